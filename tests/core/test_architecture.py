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


# ------------------------------------------------------------------------------------ rooms in one order, no arrow back

# Whoever stands later may import from whoever stands before, never the other way. jobs and video are to come.
TRAINING = (
    "errors", "storage", "config", "distributed", "data", "precision", "objectives", "run", "memory", "jobs", "video",
    "__main__",
)  # fmt: skip
HOST_ROOMS = ("patching", "clip", "model", "vae", "dataset", "memory", "refiner", "precision")
ROOM_ORDERS = {"training": TRAINING, "nodes/host": HOST_ROOMS}


def arrows(folder: str) -> dict[tuple[str, str], list[str]]:
    """(from, to) -> the imports, for the entries of a folder that import each other."""
    found: dict[tuple[str, str], list[str]] = {}
    root, inside = ROOT / folder, folder.replace("/", ".") + "."
    for path in files(folder):
        source = path.relative_to(root).with_suffix("").parts[0]
        for line, name in imports(path):
            target = name.removeprefix(inside).partition(".")[0]
            if name.startswith(inside) and target != source and (root / target).exists():
                found.setdefault((source, target), []).append(shown(path, line, name))
    return found


@pytest.mark.parametrize("folder", list(ROOM_ORDERS))
def test_rooms_stand_in_one_order_and_no_arrow_goes_back_up(folder):
    order, root = ROOM_ORDERS[folder], ROOT / folder
    packages = {path.parent.name for path in root.glob("*/__init__.py")}
    assert packages <= set(order), f"give {packages - set(order)} a place in the order of {folder}"
    # in nodes/host the modules beside the packages are what all of them share: they import no package
    place = {name: order.index(name) if name in order else -1 for pair in arrows(folder) for name in pair}
    wrong = {pair: where for pair, where in arrows(folder).items()
             if place[pair[0]] <= place[pair[1]] and place[pair[1]] != -1}  # fmt: skip
    assert wrong == {}


def test_the_top_of_training_has_at_most_twelve_entries():
    entries = {path.name for path in (ROOT / "training").iterdir()} - {"__init__.py", "__pycache__"}
    assert {Path(name).stem for name in entries} <= set(TRAINING) and len(TRAINING) <= 12, entries


def module_of(name: str) -> str | None:
    """The module that an imported name is, or is in: "training.data.index.Pair" -> "training.data.index"."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return ".".join(parts[:count])
    return None


def package_of(module: str) -> str:
    return module if (ROOT.joinpath(*module.split(".")) / "__init__.py").is_file() else module.rpartition(".")[0]


def test_no_two_packages_import_each_other():
    """Of those of which neither is inside the other: a package and its parts are one thing."""
    arrows_between = set()
    for path in [*files("training"), *files("nodes")]:
        source = ".".join(path.relative_to(ROOT).parts[:-1])
        for _, name in imports(path):
            target = package_of(module_of(name) or source)
            if not f"{target}.".startswith(f"{source}.") and not f"{source}.".startswith(f"{target}."):
                arrows_between.add((source, target))
    assert [pair for pair in sorted(arrows_between) if pair[::-1] in arrows_between] == []


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Those modules that can be reached from themselves, in groups."""
    reached = {}
    for start in graph:
        seen, waiting = set(), list(graph[start])
        while waiting:
            if (module := waiting.pop()) not in seen:
                seen.add(module)
                waiting += graph.get(module, ())
        reached[start] = seen
    groups = {tuple(sorted(b for b in reached[a] if a in reached.get(b, ()))) for a in graph if a in reached[a]}
    return sorted(map(list, groups))


def test_the_checker_finds_a_circle_of_modules():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert cycles({"a": {"b"}, "b": {"c"}}) == []


# Circles that are still there
STILL_CIRCULAR = [
    ["training.config.identity", "training.config.train_config"],  # the former for types alone
]


def test_no_modules_import_each_other_in_a_circle():
    """Not even through functions or for types alone: a circle is two things that are one, or an arrow the wrong way."""
    graph = {}
    for path in [*files("training"), *files("nodes")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        graph[module] = {module_of(name) for _, name in imports(path)} - {None, module}
    circles = [circle for circle in cycles(graph) if circle not in STILL_CIRCULAR]
    assert circles == []


# ------------------------------------------------------------------------------------------------ names, and file sizes

# Public names that stand in two modules: the same role for another object, with what that is
SAME_ROLE = {
    "Refiner": "a trained refiner at work: the core's, and the host's BaseModel",
    "add_commands": "the command line of one room",
    "compute_dtype": "what one object of the host computes in: a MODEL, a half of a VAE",
    "empty_conditioning": "what stands in for text: of a dataset, of a MODEL",
    "load_meta": "the metadata of one objective's files",
    "make_plan": "all that is decided beforehand: of a run, of a build",
    "save": "writes one kind of file: a refiner of one objective, a checkpoint",
    "sigmas": "the sampling times of one objective's mathematics",
    "state": "the noised latent of one objective's mathematics",
}


def test_no_public_name_stands_for_two_things():
    places: dict[str, set[str]] = {}
    for path in [*files("training"), *files("nodes")]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(path.relative_to(ROOT).as_posix())
    twice = {name: sorted(where) for name, where in places.items() if len(where) > 1}
    assert twice.keys() == SAME_ROLE.keys(), twice


# A name like these says nothing of what is inside, or says it in a riddle
SAY_NOTHING = {"utils", "util", "helpers", "helper", "misc", "common", "manager", "stuff"}
RIDDLES = {"carry", "take_off", "settle", "doors", "shell", "home", "sealed", "origin", "times", "numbers", "found",
           "said", "taken", "kept"}  # fmt: skip


def sources() -> list[Path]:
    """Every .py and .js of the repository, less what is made by running it."""
    made = {".dev", ".git", "demo_output", "node_modules", "__pycache__"}
    found = [path for ending in ("py", "js") for path in ROOT.rglob(f"*.{ending}")]
    return sorted(path for path in found if not made & set(path.relative_to(ROOT).parts))


def test_no_module_has_a_name_that_says_nothing():
    wrong = {path.relative_to(ROOT).as_posix() for path in sources() if path.stem in SAY_NOTHING | RIDDLES}
    wrong |= {path.relative_to(ROOT).as_posix() for path in sources() if path.parent.name in SAY_NOTHING | RIDDLES}
    assert wrong == set()


LONGEST = 350  # lines; a file that outgrows them holds two things


def test_no_file_holds_more_than_350_lines():
    long = {path.relative_to(ROOT).as_posix(): count for path in sources()
            if (count := len(path.read_bytes().splitlines())) > LONGEST}  # fmt: skip
    assert long == {}
