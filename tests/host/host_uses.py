"""What the pack uses of the host, read from its own source: a use that is not in contract.py is found without a host.

Two kinds. A *symbol* hangs on a module of the host (`comfy.model_management.vae_dtype`), with the arguments that we
call it with. A *member* is an attribute of an object that the host gives us (`patcher.patches`): the source does not
say of which class the object is. So an attribute counts as the host's if neither the pack nor torch nor the standard
library has one of that name, and on a few names that always hold a host object (`ON_THESE`) in any case.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import contextvars
import hashlib
import inspect
import io
import logging
import os
import pathlib
import re
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import PIL.Image
import PIL.ImageDraw
import torch

__all__ = ["HOST", "ON_THESE", "Call", "Use", "members_used", "symbols_used"]

PACK = Path(__file__).resolve().parents[2]
HOST = (
    "comfy", "comfy_api", "comfy_execution", "comfy_extras", "comfyui_version", "execution", "folder_paths",
    "latent_preview", "server",
)  # fmt: skip
ON_THESE = (
    "patcher", "cond_stage_model", "first_stage_model", "latent_format", "model_config", "guider", "sampling",
    "executor",
)  # fmt: skip

_FOREIGN = (
    torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.Generator, torch.device, torch.dtype, torch.finfo,
    torch.nn.functional, torch.Size, type, object, str, bytes, bytearray, dict, list, set, tuple, frozenset, int, float,
    BaseException, OSError, Path, pathlib.PurePath, os.stat_result, io.BytesIO, re.Pattern, re.Match, logging.Logger,
    contextvars.ContextVar, collections.Counter, collections.OrderedDict, contextlib.ExitStack, inspect.Signature,
    inspect.Parameter,
    types.FunctionType, types.MethodType, types.TracebackType, types.FrameType, types.ModuleType,
    traceback.TracebackException, type(hashlib.sha256()), numpy.ndarray, PIL.Image, PIL.Image.Image, PIL.ImageDraw,
    PIL.ImageDraw.ImageDraw,
)  # fmt: skip
_TORCH_MODULE = {
    "_modules", "_buffers", "_parameters", "_non_persistent_buffers_set", "_forward_hooks", "_forward_pre_hooks",
}  # fmt: skip
_AIOHTTP = {"FileResponse", "HTTPNotFound", "Request", "StreamResponse", "match_info"}
_SCHEMA_API = "comfy_api.latest"
_LOOKS = ("getattr", "hasattr", "setattr", "delattr")


@dataclass(frozen=True)
class Call:
    """The arguments of one call: how many by position, which by name."""

    positional: int
    names: frozenset[str]


@dataclass
class Use:
    """Where something of the host is used, and how it is called there."""

    where: set[str] = field(default_factory=set)
    calls: set[Call] = field(default_factory=set)


def _sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(path for folder in folders for path in (PACK / folder).rglob("*.py")):
        yield path.relative_to(PACK).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def _one_version(module: str) -> str:
    """The host's schema API comes in versions, of which the pack may take one or another."""
    return _SCHEMA_API if re.fullmatch(r"comfy_api\.(latest|v\d+_\d+_\d+)", module) else module


def _dotted(node: ast.expr) -> list[str] | None:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


class _Names:
    """What the names of one file stand for: local name -> dotted name in the host."""

    def __init__(self, tree: ast.Module) -> None:
        self.of: dict[str, str] = {}
        self.modules: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] in HOST:
                        self.modules.add(alias.name)
                        top = alias.name.split(".")[0]
                        self.of[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in HOST:
                module = _one_version(node.module)
                self.modules.add(module)
                for alias in node.names:
                    self.of[alias.asname or alias.name] = f"{module}.{alias.name}"
            elif isinstance(node, ast.ImportFrom) and node.level and (node.module or "").split(".")[-1] == "api":
                self.modules.add(_SCHEMA_API)  # nodes/host/api.py hands it on
                for alias in node.names:
                    if alias.name in ("ComfyExtension", "io", "ui"):
                        self.of[alias.asname or alias.name] = f"{_SCHEMA_API}.{alias.name}"
        for node in ast.walk(tree):  # management = comfy.model_management, also in `a, b = comfy.x, c`
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assigned(target, node.value)

    def _assigned(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for each, its_value in zip(target.elts, value.elts, strict=True):
                self._assigned(each, its_value)
        elif isinstance(target, ast.Name) and (whole := self.whole(value)) in self.modules:
            self.of[target.id] = whole

    def whole(self, node: ast.expr) -> str | None:
        """The full dotted name, None for what is not of the host."""
        parts = _dotted(node)
        if parts is None or parts[0] not in self.of:
            return None
        return ".".join([self.of[parts[0]], *parts[1:]])

    def symbol(self, whole: str) -> str | None:
        """`whole` up to the first name that is no module and no class: what comes after is a member of an object."""
        parts = whole.split(".")
        inside = max((m.count(".") + 1 for m in self.modules if whole == m or whole.startswith(f"{m}.")), default=0)
        if inside in (0, len(parts)):
            return None
        end = inside + 1
        while end < len(parts) and (parts[end - 1][:1].isupper() or parts[end - 1] in ("io", "ui")):
            end += 1
        return ".".join(parts[:end])


def symbols_used() -> dict[str, Use]:
    """Dotted name in the host -> its uses, of everything that hangs on a module of the host."""
    found: dict[str, Use] = collections.defaultdict(Use)
    for path, tree in [*_sources("nodes"), ("__init__.py", ast.parse((PACK / "__init__.py").read_text()))]:
        names = _Names(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in HOST:
                for alias in node.names:
                    found[f"{_one_version(node.module)}.{alias.name}"].where.add(path)
            if isinstance(node, (ast.Attribute, ast.Name)) and (whole := names.whole(node)):
                symbol = names.symbol(whole)
                if symbol:
                    found[symbol].where.add(path)
            if isinstance(node, ast.Call):
                _note_call(node, names, path, found)
    return dict(found)


def _note_call(node: ast.Call, names: _Names, path: str, found: dict[str, Use]) -> None:
    whole = names.whole(node.func)
    if whole and names.symbol(whole) == whole:
        given = frozenset(each.arg for each in node.keywords if each.arg)
        starred = any(isinstance(each, ast.Starred) for each in node.args)
        found[whole].calls.add(Call(0 if starred else len(node.args), given))
    if isinstance(node.func, ast.Name) and node.func.id in _LOOKS and len(node.args) > 1:
        whole, name = names.whole(node.args[0]), node.args[1]
        if whole in names.modules and isinstance(name, ast.Constant):
            found[f"{whole}.{name.value}"].where.add(path)


def members_used() -> dict[str, Use]:
    """Attribute -> its uses, of objects that the host gives us, in nodes/host."""
    ours, foreign = _ours(), _foreign()
    found: dict[str, Use] = collections.defaultdict(Use)
    for path, tree in _sources("nodes/host"):
        names = _Names(tree)
        modules = {alias.asname or alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import)
                   for alias in node.names}  # fmt: skip
        calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            holder, attribute = _access(node)
            if attribute is None or attribute.startswith(("ref2v_", "__")) or attribute in foreign:
                continue
            root = holder
            while isinstance(root, (ast.Attribute, ast.Call, ast.Subscript)):
                root = root.func if isinstance(root, ast.Call) else root.value
            if (whole := names.whole(holder)) and any(m.startswith(f"{whole}.{attribute}") for m in names.modules):
                continue  # on the way to a module
            of_module = isinstance(holder, (ast.Name, ast.Attribute)) and (whole := names.whole(holder)) and (
                whole in names.modules or names.symbol(f"{whole}.{attribute}") == f"{whole}.{attribute}"
            )  # fmt: skip
            if of_module or isinstance(root, ast.Name) and root.id in modules and not names.whole(root):
                continue
            if attribute not in ours or _last(holder) in ON_THESE:
                found[attribute].where.add(path)
                if isinstance(node, ast.Attribute) and id(node) in calls:
                    call = calls[id(node)]
                    given = frozenset(each.arg for each in call.keywords if each.arg)
                    starred = any(isinstance(each, ast.Starred) for each in call.args)
                    found[attribute].calls.add(Call(0 if starred else len(call.args), given))
        for attribute in _in_tables(tree):
            found[attribute].where.add(path)
    return dict(found)


def _in_tables(tree: ast.Module) -> set[str]:
    """Attributes named by the texts of a table that the file goes through with getattr, setattr and the like."""
    tables = {
        target.id: [item.value for item in node.value.elts if isinstance(item, ast.Constant)]
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Name) and node.iter.id in tables:
            inside = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
            if any(_dotted(call.func) and _dotted(call.func)[-1] in (*_LOOKS, "get", "pop") for call in inside):
                found |= {text for text in tables[node.iter.id] if isinstance(text, str) and text.isidentifier()}
    return found


def _access(node: ast.AST) -> tuple[ast.expr | None, str | None]:
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _LOOKS and len(node.args) > 1:
        name = node.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return node.args[0], name.value
    return None, None


def _last(node: ast.expr | None) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _ours() -> set[str]:
    """Every name that the pack itself gives to a function, class, field or attribute of its own."""
    found = set()
    for _path, tree in _sources("nodes", "training"):
        for line in tree.body:
            found |= {target.id for target in getattr(line, "targets", []) if isinstance(target, ast.Name)}
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                found.add(node.name)
            if isinstance(node, ast.ClassDef):
                for line in node.body:
                    targets = [line.target] if isinstance(line, ast.AnnAssign) else getattr(line, "targets", [])
                    found |= {target.id for target in targets if isinstance(target, ast.Name)}
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _last(node.value) == "self":
                found.add(node.attr)
    return found


def _foreign() -> set[str]:
    return (_TORCH_MODULE | _AIOHTTP).union(*(dir(kind) for kind in _FOREIGN))
