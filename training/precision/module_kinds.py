"""Which modules of a network are of the kinds that lose most in a low dtype, found by class and by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

__all__ = ["EMBEDDINGS", "IN_OUT", "KINDS", "LAST", "NORMS", "ModuleMatch", "find_modules", "split_patterns"]

NORMS, EMBEDDINGS, IN_OUT = "norms", "embeddings", "in and out"
KINDS = (NORMS, EMBEDDINGS, IN_OUT)

_NORM_CLASSES = (
    torch.nn.GroupNorm,
    torch.nn.LayerNorm,
    torch.nn.RMSNorm,
    torch.nn.modules.batchnorm._BatchNorm,
    torch.nn.modules.instancenorm._InstanceNorm,
)
# Children of the network, as the original UNets, diffusers and the transformers of the last years call them.
_NAMES = {
    EMBEDDINGS: (
        "time_embed", "label_emb", "time_embedding", "add_embedding", "class_embedding", "time_in",
        "vector_in", "guidance_in", "t_embedder", "y_embedder", "time_projection", "time_text_embed", "adaln_single",
    ),
    IN_OUT: (
        "input_blocks.0", "out", "conv_in", "conv_norm_out", "conv_out", "img_in", "x_embedder", "final_layer",
        "patch_embedding", "patch_embed", "proj_in", "proj_out", "head",
    ),
}  # fmt: skip
# Those of them whose output is the network's: it need not go back into the low dtype.
LAST = frozenset({"out", "conv_out", "final_layer", "proj_out", "head"})
# Lists, and containers whose children the network calls one by one: a hook on them would never run.
_NEVER_CALLED = ("ModuleList", "ModuleDict", "TimestepEmbedSequential")


@dataclass(frozen=True)
class ModuleMatch:
    """modules: name -> the kind or the pattern that it was found by; no one of them lies within another.
    missing: kinds and patterns that found none.
    """

    modules: dict[str, str]
    missing: tuple[str, ...]


def find_modules(root: torch.nn.Module, kinds: Iterable[str], patterns: Iterable[str] = ()) -> ModuleMatch:
    """Modules of `root` of these `KINDS`, or whose name fits one of `patterns` (as of shells, such as "*.attn2*")."""
    named = [(name, module) for name, module in root.named_modules() if name]
    modules: dict[str, str] = {}
    missing = []
    for by in (*kinds, *patterns):
        hits = [hit for name, module in named if _fits(by, name, module) for hit in _called(name, module)]
        modules |= {name: by for name in hits if name not in modules}
        if not hits:
            missing.append(by)
    outer = {name: by for name, by in modules.items() if not any(parent in modules for parent in _parents(name))}
    return ModuleMatch(outer, tuple(missing))


def split_patterns(text: str) -> tuple[str, ...]:
    """Patterns that a person has written with commas or line breaks between them, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.replace("\n", ",").split(",") if part.strip()))


def _fits(by: str, name: str, module: torch.nn.Module) -> bool:
    if by == NORMS:
        is_norm = isinstance(module, _NORM_CLASSES) or type(module).__name__.endswith("Norm")
        return is_norm and not any(True for _ in module.children())
    if by in _NAMES:
        return name in _NAMES[by]
    return fnmatchcase(name, by)


def _called(name: str, module: torch.nn.Module) -> Iterator[str]:
    if type(module).__name__ not in _NEVER_CALLED:
        yield name
        return
    for child, part in module.named_children():
        yield from _called(f"{name}.{child}", part)


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
