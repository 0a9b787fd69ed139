"""The API must not read any path: what a text in a graph may lead to (tests/host/paths_in_host.py tries it)."""

import sys

import pytest

from tests.host.host_process import all_passed, run_in_host

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="links need rights there that a test should not ask for"
)


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("paths")
    return all_passed(run_in_host("paths_in_host.py", host_path, folder))


def test_folders_of_the_host_are_found_however_they_are_written(results):
    assert results["inside"] == {
        "bare input": "input/pictures",
        "bare output": "output/refiner_datasets/data",
        "named output": "output/refiner_datasets/data",
        "quoted": "input/pictures",
        "absolute": "input/pictures",
        "link inside": "input/pictures",
        "dots inside": "input/pictures",
        "model": "models/refiners/shared.safetensors",
    }


def test_nothing_outside_is_reached_or_told_about(results):
    for name, said in results["outside"].items():
        assert said.startswith("The folder must lie inside"), name
    # whether something is there must not show
    links = (results["outside"][name].replace("none", "secret") for name in ("link", "link, nothing there"))
    assert len(set(links)) == 1


def test_nothing_there_is_said(results):
    assert "path is empty" in results["nothing"]["empty"]
    assert "does not exist" in results["nothing"]["absent"]
    assert "zero byte" in results["nothing"]["zero byte"]


def test_the_owner_of_the_machine_can_allow_a_root(results):
    config = results["config"]
    assert "must lie inside" in config["before"] and config["allowed"].endswith("secret")
    for name in ("no JSON", "no list", "a list", "relative"):
        assert "config.json must be JSON like" in config[name] and "\n" not in config[name], name


def test_names_that_no_folder_can_have_are_refused(results):
    passed = [name for name, said in results["names"].items() if said == "PASSED"]
    assert passed == ["a run-1_b.c", "\u56fe\u7247"]
    assert not [said for said in results["names"].values() if said.startswith("NOT A SENTENCE")]


def test_refiners_are_listed_without_checkpoints_and_adapters(results):
    refiners = results["refiners"]
    assert refiners["list"] == [
        "run.previous-1/refiner.safetensors",
        "run.previous-2/refiner.safetensors",
        "shared.safetensors",
    ]
    assert refiners["folders"] == refiners["entries"] == 2
    assert refiners["file"] == "models/refiners/shared.safetensors"
    assert "does not exist" in refiners["gone"] and "does not exist" in refiners["out"]
    assert refiners["aside"] == "run.previous-2"
