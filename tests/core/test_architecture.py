"""The arrows of the architecture: __init__ -> nodes -> nodes/host -> comfy, and nodes -> training, never back."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOST = {"comfy", "comfy_extras", "comfy_execution", "comfy_config", "folder_paths", "server", "nodes", "execution"}
HEAVY = ("diffusers", "matplotlib", "skimage", "tensorboard", "torch.utils.tensorboard", "imagehash", "scipy", "peft")


def imports(path: Path) -> set[tuple[int, str]]:
    """(line, absolute dotted name) of every import, also those inside functions; relative ones are resolved."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {(node.lineno, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level > len(package) + 1:
                found.add((node.lineno, "<outside the pack>"))
                continue
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import x` names a module, `from .x import y` mostly something in it
            found |= {(node.lineno, f"{name}.{alias.name}".lstrip(".")) for alias in node.names}
    return found


def first(name: str) -> str:
    return name.partition(".")[0]


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, folder
    return found


def shown(path: Path, line: int, name: str) -> str:
    return f"{path.relative_to(ROOT)}:{line} imports {name}"


def test_the_checker_sees_every_kind_of_import(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "training" / "data" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import comfy.utils as u\nfrom folder_paths import base_path\nfrom ...nodes.host import vae\n"
        "def f():\n    from .. import config\n    from .index import Pair\n    from ....beyond import y\n"
    )
    assert {name for _, name in imports(path)} == {
        "comfy.utils", "folder_paths.base_path", "nodes.host.vae", "training.config", "training.data.index.Pair",
        "<outside the pack>",
    }


def test_the_training_core_knows_neither_the_host_nor_the_nodes():
    wrong = [
        shown(path, line, name)
        for path in files("training")
        for line, name in imports(path)
        if first(name) in HOST or first(name).startswith("comfy") or name == "<outside the pack>"
    ]
    assert wrong == []


def test_only_nodes_host_touches_the_host():
    """The nodes themselves see nodes/host and training, so a host change is mended in one room."""
    wrong = []
    for path in [ROOT / "__init__.py", *files("nodes")]:
        if (ROOT / "nodes" / "host") in path.parents:
            continue
        for line, name in imports(path):
            own = name.startswith(("nodes.", "training."))
            if first(name) in HOST and not own or first(name).startswith("comfy"):
                wrong.append(shown(path, line, name))
    assert wrong == []


def test_the_hosts_schema_api_is_imported_in_one_place():
    users = {path.relative_to(ROOT).as_posix() for path in files("nodes") for _, name in imports(path)
             if first(name) == "comfy_api"}  # fmt: skip
    assert users == {"nodes/host/api.py"}


def test_the_host_room_does_not_know_the_nodes_that_use_it():
    rooms = {path.stem for path in (ROOT / "nodes").glob("*.py")}
    wrong = [
        shown(path, line, name)
        for path in files("nodes/host")
        for line, name in imports(path)
        if name.startswith("nodes.") and name.split(".")[1] in rooms - {"__init__"}
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", ["training", "nodes"])
def test_imports_inside_the_pack_are_relative(folder):
    """The pack's module name is a file path inside the host: an absolute import would find another module, or none."""
    wrong = []
    for path in files(folder):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            wrong += [shown(path, node.lineno, n) for n in names if first(n) in ("training", "nodes", "tests")]
    if folder == "nodes":  # the host's own nodes.py is reached by that name from nodes/host alone
        wrong = [entry for entry in wrong if not (entry.startswith("nodes/host/") and entry.endswith("imports nodes"))]
    assert wrong == []


@pytest.mark.parametrize("folder", ["nodes", "training"])
def test_whatever_gets_its_final_name_gets_it_by_the_one_function_that_tries_again(folder):
    """training/storage/files.py: on Windows a file that something has open cannot be renamed for a moment."""
    renaming = {
        (path.relative_to(ROOT).as_posix(), node.lineno)
        for path in files(folder)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and (node.attr in ("rename", "renames") or (node.attr == "replace" and ast.unparse(node.value) == "os"))
    }
    assert {path for path, _ in renaming} <= {"training/storage/files.py"}, renaming


def test_the_heavy_libraries_wait_until_they_are_needed():
    """Everything that the host imports at its start, without what takes seconds to load."""
    modules = ["training.run.train", "training.run.report.report", "training.config.train_config"]
    modules += ["training.objectives.residual.model", "training.data.shards"]
    modules += ["training.memory.estimate", "training.memory.chart"]
    code = f"import sys; sys.path.append({str(ROOT)!r})\n" + "".join(f"import {m}\n" for m in modules)
    code += f"print(*[m for m in {HEAVY!r} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []
