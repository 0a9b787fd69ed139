"""What the Comfy registry and installers read from the root."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages_of(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for raw in lines if (line := raw.partition("#")[0].strip())]


def test_requirements_and_pyproject_list_the_same_packages(project):
    assert project["project"]["dependencies"] == packages_of("requirements.txt")


def test_the_extras_are_those_of_their_file_and_developers_have_them(project):
    extras = project["project"]["optional-dependencies"]
    assert sorted(sum(extras.values(), [])) == sorted(packages_of("requirements-extra.txt"))
    assert "-r requirements-extra.txt" in packages_of("requirements-dev.txt")


def test_nothing_caps_or_pins_what_a_user_has_installed(project):
    for requirement in project["project"]["dependencies"]:
        assert not re.search(r"==|<|~=", requirement), f"{requirement} would replace a version that works for the user"


def test_the_registry_finds_what_it_asks_for(project):
    name = project["project"]["name"]
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{1,98}", name) and "comfyui" not in name.lower()
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["project"]["version"])
    assert (ROOT / project["project"]["license"]["file"]).is_file()
    assert project["tool"]["comfy"]["requires-comfyui"] == ">=0.3.75"


def test_no_accelerator_is_claimed_that_nobody_tried(project):
    """The host reads these lines. Where docs/precision.md says that a GPU was tried, one may stand here."""
    assert not [line for line in project["project"]["classifiers"] if line.startswith("Environment ::")]


def test_sources_hold_nothing_that_a_windows_console_cannot_show():
    """A rule of the public checkers too, which run in --full. Texts in other scripts are data."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if any(part.startswith(".") for part in path.relative_to(ROOT).parts):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.encode("cp1252", "ignore").decode("cp1252") != line:
                found.append(f"{path.relative_to(ROOT)}:{number}: {ascii(line.strip())}")
    assert found == []


def test_every_package_that_is_asked_for_is_imported(project):
    """A name in the list that nobody imports is a download and a clash for nothing."""
    names = {"pillow": "PIL"}
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "training").rglob("*.py"))
    for requirement in project["project"]["dependencies"]:
        package = re.match(r"[\w-]+", requirement)[0]
        assert re.search(rf"^\s*(import|from) {names.get(package, package)}\b", text, re.MULTILINE), package
