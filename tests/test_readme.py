"""What the READMEs and docs say must be there."""

import re
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
    for name in re.findall(r"`((?:training|nodes|dev|docs|workflows)/[\w/.]+\.\w+)`", text):
        assert (ROOT / name).is_file(), name


def test_architecture_names_files_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:training|nodes|dev|docs|tests|locales)/[\w/.]+\.(?:py|md|json))`", text)
    assert len(named) > 20
    for name in named:
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("page", ["docs/pitfalls.md", "docs/zh/pitfalls.md"])
def test_a_test_that_is_named_as_holding_a_statement_is_there(page):
    named = set(re.findall(r"`(test_\w+)`", (ROOT / page).read_text(encoding="utf-8")))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "core").rglob("test_*.py"))
    assert len(named) > 10
    assert not {name for name in named if f"def {name}(" not in sources}
