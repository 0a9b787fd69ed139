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
        "from Windows": "output/refiner_datasets/data",
        "named, from Windows": "output/refiner_datasets/data",
        "named in capitals": "output/refiner_datasets/data",
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
    assert passed == [
        "a run-1_b.c",
        "\u56fe\u7247",
        "\u0939\u093f\u0928\u094d\u0926\u0940",  # Hindi
        "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22\u0e17\u0e35\u0e48",  # Thai
        "\u0ba4\u0bae\u0bbf\u0bb4\u0bcd",  # Tamil
        "de\u0301ja\u0300",  # a decomposed accent
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  # Persian, with a joiner
    ]
    assert not [said for said in results["names"].values() if said.startswith("NOT A SENTENCE")]


def test_one_name_is_one_folder_however_it_is_spelled(results):
    assert results["one_name_in_two_spellings"] is True


def test_on_windows_a_name_leaves_room_for_the_files_in_its_folder(results):
    names = results["names_on_windows"]
    assert names["fits"] == "PASSED"
    assert names["one more"].endswith("would have 1 more: give it a name that is 1 characters shorter.")
    assert names["dataset"].startswith("name is too long: Windows opens paths of 259 characters")


def test_the_model_library_of_the_host_lists_finished_files_alone(results):
    library = results["what_the_host_lists"]["library"]
    assert [name for name in library if ".checkpoints" in name] == [] and "run/refiner.safetensors" in library
    # the plain list walks hidden folders, so Load Refiner leaves them out itself (the last test here)
    assert "run/.checkpoints/step-00000001/refiner.safetensors" in results["what_the_host_lists"]["menu"]


def test_a_workflow_from_windows_finds_its_files(results):
    assert results["a_name_with_the_other_separator"] == [
        "output/refiners/run.previous-1/refiner.safetensors", "output/refiners/run.previous-1/refiner.safetensors",
        "models/vae/sub/x.safetensors", "models/checkpoints/sub/x.safetensors",
    ]  # fmt: skip


def test_a_runs_own_file_does_not_lead_the_host_out_of_its_folders(results):
    found = results["a_run_that_says_it_starts_outside"]
    assert found["prints"] == 1
    assert found["said"].startswith("refiner.start_from must lie inside ComfyUI's input, output, temp or model folders")


def test_a_key_that_stands_twice_in_options_is_told_and_a_byte_order_mark_is_read_over(results):
    found = results["options_of_a_person"]
    assert found["twice"].startswith("options: 'data' stands twice in one object")
    assert found["marked"] == {"data": {"repeats": 2}}


def test_datasets_of_a_name_are_not_those_of_a_longer_one(results):
    assert results["datasets_of_a_name"] == ["a-0123456789", "a-0123456789", "a-b-0123456789"]


def test_sentences_name_no_folder_of_the_server(results):
    said = results["wording"]
    assert said["output"] == "The dataset output/refiner_datasets/a (x) and output."
    assert said["input"] == "looked for input/x and 'output/x'"
    assert said["models"] == "no file in models/refiners or models/vae/x"
    assert said["user"] == "listed in user/__ref2v/config.json"
    assert said["elsewhere"] == "models/ref2v_test/x.safetensors is bad"
    assert "output-other" in said["another"] and said["another"].endswith("/input")
    assert said["node"].endswith("but output/refiners/run is a folder.")
    assert "strength" in said["signature"]


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
