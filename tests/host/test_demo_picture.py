"""The picture that the demo refines must be one that it has not trained on."""

import sys
from concurrent.futures import ThreadPoolExecutor

from tests.host.server import PACK
from tests.host.workflows import api, of_type
from training.data.picture_files import list_pictures
from training.data.pictures import read_picture
from training.data.split import perceptual_hash, split

sys.path.append(str(PACK / "dev"))
from demo import PICTURES, copy_pictures  # noqa: E402


def test_refine_starts_from_a_held_out_picture(tmp_path):
    copy_pictures(tmp_path)
    names = list_pictures(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        hashes = list(pool.map(lambda name: perceptual_hash(read_picture(tmp_path / name)), names))
    prompt = api("train_refiner")
    dataset = prompt[of_type(prompt, "Ref2VBuildRefinerDataset")[0]]["inputs"]
    assert dataset["folder"] == PICTURES
    sides = split(names, hashes, dataset["held_out"], dataset["seed"])
    held_out = [name for name, (_, side) in sides.items() if side == "held_out"]
    for name in ("refine", "refine_split", "refine_custom_sampler", "train_and_refine"):
        picture = api(name)[of_type(api(name), "LoadImage")[0]]["inputs"]["image"]
        assert picture in held_out
