"""What READMEs, docs and comments name must be there."""

import fnmatch
import os
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_repository_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_numbers_are_those_of_a_run(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    section = text.partition("numbers: begin")[2].partition("numbers: end")[0]
    assert len(re.findall(r"^\| .*\d\.\d+ \|", section, re.MULTILINE)) >= 6, "run dev/write_numbers.py"


@pytest.mark.parametrize("page", ["README.md", "README.zh.md", "docs/refiner.md", "docs/zh/refiner.md"])
def test_every_workflow_and_file_that_is_named_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(r"\*\*(refine|(?:train|refine|generate)_[a-z_]+)\*\*", text):
        assert (ROOT / "workflows" / f"{name}.json").is_file(), name


# ------------------------------------------------------------------------------------------------- the paths in texts

ROOTED = re.compile(
    r"(?<![\w/.\-])((?:training|nodes|tests|dev|docs|benchmarks|workflows|web|locales)/[\w./*<>-]*[\w*>])(?!\()"
)
MODULE = re.compile(r"(?<![\w/.\-*<])((?:[\w-]+/)*\w+\.py)\b")
STANDS_FOR_A_NAME = re.compile(r"<\w+>|\b(?:NAME|SCRIPT|COMMIT)\b")
OF_OTHERS = re.compile(r"comfy/|(?:main|nodes|protocol)\.py$|sageattention/|(?:quant|flash_attn_interface)\.py$")
NOT_PUBLISHED = {".git", ".dev", ".hypothesis", ".pytest_cache", ".ruff_cache", "__pycache__", "demo_output"}


@pytest.fixture(scope="module")
def files() -> set[str]:
    """Every file of the repository, as paths from its root, and every folder."""
    found = set()
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in NOT_PUBLISHED]  # .dev alone holds 100,000 files
        found |= {(Path(folder) / name).relative_to(ROOT).as_posix() for name in [*folders, *names]}
    return found


def missing(named: set[str], files: set[str], *, anywhere: bool = False) -> list[str]:
    """Those of the named paths that lead to no file. anywhere: the end of a file's path is enough."""
    lost = []
    for name in sorted(named - files):
        pattern = STANDS_FOR_A_NAME.sub("*", name)
        if not fnmatch.filter(files, pattern) and not (anywhere and fnmatch.filter(files, f"*/{pattern}")):
            lost.append(name)
    return lost


def comments(path: Path) -> str:
    """The comments and the docstrings of a Python file."""
    with open(path, "rb") as source:
        tokens = list(tokenize.tokenize(source.readline))
    return "\n".join(
        token.string
        for token in tokens
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""'))
    )


def test_a_path_that_leads_nowhere_is_seen(files):
    assert missing({"training/no_such_room/x.py", "docs/architecture.md", "web/docs/<NodeId>/en.md"}, files) == [
        "training/no_such_room/x.py"
    ]
    assert missing({"architecture.py", "dev.py", "host/paths.py"}, files, anywhere=True) == ["architecture.py"]


@pytest.mark.parametrize("suffix", [".md", ".py", ".js", ".toml"])
def test_every_path_that_is_written_from_the_root_exists(files, suffix):
    wrong = {}
    for name in sorted(files):
        if name.endswith(suffix) and name != Path(__file__).relative_to(ROOT).as_posix():
            named = set(ROOTED.findall((ROOT / name).read_text(encoding="utf-8")))
            if lost := missing(named, files):
                wrong[name] = lost
    assert wrong == {}


def test_every_module_that_docs_and_comments_name_exists(files):
    wrong, named = {}, 0
    for name in sorted(files):
        if name.endswith(".md") or (name.endswith(".py") and name != Path(__file__).relative_to(ROOT).as_posix()):
            text = comments(ROOT / name) if name.endswith(".py") else (ROOT / name).read_text(encoding="utf-8")
            modules = {module for module in MODULE.findall(text) if not OF_OTHERS.match(module)}
            named += len(modules)
            if lost := missing(modules, files, anywhere=True):
                wrong[name] = lost
    assert wrong == {} and named > 200


def test_every_name_of_the_code_stands_in_a_file_of_its_row(files):
    """The table of what to change where: `resolve_inside` beside `nodes/host/paths.py` is in that file."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## What to change where")[2]
    named = 0
    for row in re.findall(r"^\|.*\|$", text.partition("\n## ")[0], re.MULTILINE):
        terms = re.findall(r"`([^`]+)`", row)
        paths = [path for term in terms if "/" in term for path in fnmatch.filter(files, term)]
        sources = "".join((ROOT / path).read_text(encoding="utf-8") for path in paths if path.endswith(".py"))
        for name in re.findall(r"`(\w*[A-Z_]\w*|make_plan|claim|overhead|fingerprint)`", row):
            named += 1
            assert re.search(rf"\b{name}\b", sources), f"{name} is in none of {paths}"
    assert named > 12


@pytest.mark.parametrize("page", ["docs/pitfalls.md", "docs/zh/pitfalls.md"])
def test_a_test_that_is_named_as_holding_a_statement_is_there(page):
    named = set(re.findall(r"`(test_\w+)`", (ROOT / page).read_text(encoding="utf-8")))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "core").rglob("test_*.py"))
    assert len(named) > 10
    assert not {name for name in named if f"def {name}(" not in sources}
