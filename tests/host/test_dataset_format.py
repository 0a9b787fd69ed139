"""What Build Refiner Dataset writes: version 2 of the format, with all that it can hold.

The numbers come from tests/host/dataset_format_in_host.py, which runs once in a process of its own.
"""

import pytest

from tests.host.checkpoints import make_checkpoints
from tests.host.conftest import STATE
from tests.host.host_process import passed, run_in_host


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset format")
    made = make_checkpoints(host_path, folder / "checkpoints", cache=STATE / "checkpoints")
    return run_in_host("dataset_format_in_host.py", host_path, folder, str(made[0].parent))


@pytest.fixture
def check(results, request):
    """The results of the check that the test is named after."""
    return passed(results, request.node.originalname.removeprefix("test_"))


def test_captions_are_stored_once_and_half_precision_where_asked(check):
    assert check["versions"] == [2, 2] and check["captions"] == 2  # "a boat" and the empty one, of four pairs
    for full, half in (check["text bytes"], check["latent bytes"]):
        assert 0.45 < half / full < 0.55
    assert check["text bytes"][0] < 2.1 * 77 * 768 * 4
    assert all(0 < each < 1e-3 for each in check["errors"])
    full, half, again = check["folders"]
    assert full != half == again and [said.split()[0] for said in check["said"]] == ["Built", "Built", "Reused"]
    assert "stored in" not in check["said"][0] and "stored in float16." in check["said"][1]


def test_a_dataset_of_version_1_is_found_again(check):
    """The recipe did not change with the format, for the tensors are the same."""
    assert check == {"version": 1, "folders": [True, "Reused"], "same": True}


def test_a_stopped_build_goes_on_with_what_it_had(check):
    assert check["stopped"] and check["shards left"] == 2
    assert check["pairs"] == 9 and "Went on with the 4 pairs that a stopped build had finished." in check["said"]
    assert len(check["files"]) > 5 and check["differ"] == []


def test_a_base_of_its_own_size_is_brought_to_the_targets_grid(check):
    assert check["sizes"] == {"own": [8, 16], "target's": [0, 0], "larger": [0, 0]}  # in cells
    assert check["shape"] == [[4, 16, 24]] * 2
    assert check["error"] < 1e-5 < 0.01 < check["against the target's size"]
    assert check["folders"] == 3 and check["index"] == [96, None, 512]
    assert "at the area of 96x96 and enlarged" in check["said"]
    assert check["refused"] == "The base's width 96 and height 0 belong together: give both, or 0 for both."


def test_masks_of_files_and_of_opacity_lie_on_the_latents_grid(check):
    """A row of each mask: a picture of 8 x 16 cells whose left half counts."""
    masks = check["masks"]
    left = [1.0] * 8 + [0.0] * 8
    assert set(masks) == {
        f"{name}{side}" for name in ("cut.png", "both.png", "deep/plain.jpg", "none.png") for side in ("", " mirrored")
    }
    assert masks.pop("none.png") is None and masks.pop("none.png mirrored") is None
    for name, (shape, row) in masks.items():
        wanted = left[::-1] if name.endswith("mirrored") else left
        assert shape == [1, 8, 16] and row == pytest.approx(wanted, abs=0.1), name
    assert "Masks: 3." in check["said"] and "masks without a picture: 1 (lonely_mask.png)" in check["said"]
    assert "black.png is masked out all over" in check["said"]
    assert "turned.png is 128x64 and its mask 64x128: both must show the same frame" in check["said"]
    assert check["folders"] == 3 and check["pictures without the switch"] == 9 and not check["masked"]
    assert check["of a batch"] == left
    assert check["latents"].startswith("masks needs pictures")


def test_subfolders_have_weights_where_that_is_asked_for(check):
    assert check["weights"] == {"10_fox": 10.0, "2_hare": 2.0}
    assert check["subsets"] == {"10_fox/a.png": "10_fox", "10_fox/deep/b.png": "10_fox", "2_hare/c.png": "2_hare",
                                "d.png": ""}  # fmt: skip
    assert check["said"] == ["Subsets: 10_fox: 2 of weight 10, 2_hare: 1 of weight 2, others: 1 of weight 1."]
    assert check["plain"] == [{}, True]
    assert check["none"].startswith("subset_weights needs a folder with subfolders")


def test_pictures_at_several_resolutions(check):
    """Of 256 x 128, 256 x 128 and 64 x 64 pixels at the areas of 64 x 64 and 128 x 128; sizes in cells."""
    whole = [each[:3] for each in check["pairs"] if not each[3]]
    small = {(height, width) for name, height, width in whole if name == "image00002"}
    assert small == {(8, 8)} and len(whole) == 5
    for name in ("image00000", "image00001"):
        large, = {(height, width) for each, height, width in whole if each == name} - {(8, 8)}
        assert 64 < large[0] * large[1] <= 256
    assert set(check["sides"].values()) == {1} and check["held out"] in (1, 2)
    assert all(each < 1e-4 for each in check["errors"])
    assert check["parsed"] == [[512, 768], []]
    assert all(said.startswith("resolutions must be sides in pixels") for said in check["refused"])
