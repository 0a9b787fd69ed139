"""Files that are cut, changed or gone, full and read-only disks: a clear sentence, and nothing lost."""

import os
import random
import shutil

import pytest
import torch

from training.data.shards import RefinerDataset
from training.errors import BadInput
from training.run.checkpoints import checkpoint as checkpoints
from training.run.checkpoints.checkpoint import Checkpoint, load_newest
from training.run.run_folder import RunFolder
from training.storage.checksums import CHECKSUMS

FILES = [*sorted(checkpoints.FILES), CHECKSUMS]
DAMAGES = ["cut", "flipped", "gone"]
BRIEF = {"validation__pictures": 0}


def damage(path, kind: str, seed: int) -> None:
    whole = path.read_bytes()
    place = random.Random(f"{path.name} {kind} {seed}").randrange(len(whole))
    if kind == "gone":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(whole[:place])
    else:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])


@pytest.fixture(scope="session")
def stopped_at_ten(dataset, tmp_path_factory):
    """A run that was stopped at step 10 of 12, with checkpoints of 8 and 10. Copied, never written."""
    from tests.core.conftest import Watcher, configuration

    config = configuration(dataset, tmp_path_factory.mktemp("faults") / "run", **BRIEF)
    assert Watcher(stop_after=10).train(config).status == "stopped"
    return config.run


@pytest.mark.parametrize("name, kind", list(zip(FILES, [*DAMAGES, *DAMAGES], strict=False)))
def test_a_damaged_newest_checkpoint_costs_two_steps_and_is_named(
    stopped_at_ten, configure, watch, whole_run, name, kind
):
    check_damage(stopped_at_ten, configure, watch, whole_run, name, kind, seed=0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_any_damage_to_any_file_costs_two_steps_and_is_named(
    stopped_at_ten, configure, watch, whole_run, name, kind, seed
):
    check_damage(stopped_at_ten, configure, watch, whole_run, name, kind, seed)


def check_damage(stopped_at_ten, configure, watch, whole_run, name, kind, seed):
    shutil.copytree(stopped_at_ten, configure().run)
    damage(configure().run / ".checkpoints" / "step-00000010" / name, kind, seed)
    watcher = watch()
    result = watcher.train(configure(**BRIEF))
    assert watcher.steps == [9, 10, 11, 12]
    (said,) = [text for text in watcher.messages if "passed over" in text]
    assert said.startswith("step-00000010 passed over: ") and "\n" not in said and len(said) < 300
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


def test_where_every_checkpoint_is_damaged_it_begins_again_and_says_so(stopped_at_ten, configure, watch, whole_run):
    shutil.copytree(stopped_at_ten, configure().run)
    for step in (8, 10):
        damage(configure().run / ".checkpoints" / f"step-{step:08d}" / "weights.safetensors", "flipped", step)
    watcher = watch()
    result = watcher.train(configure(**BRIEF))
    assert watcher.steps == list(range(1, 13))
    assert len([text for text in watcher.messages if "weights.safetensors is damaged" in text]) == 2
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


# ---- the dataset ----------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_a_shard_stops_a_run_before_its_first_step(configure, watch, build_pairs):
    """Of unchanged size, so that only its SHA-256 tells."""
    folder = build_pairs()
    shard = folder / "shard-00000.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    RefinerDataset.open(folder)
    watcher = watch()
    with pytest.raises(BadInput, match=r"shard-00000\.safetensors of the dataset .* is damaged, its SHA-256 is not"):
        watcher.train(configure(dataset=folder, **BRIEF))
    assert watcher.steps == [] and RunFolder(configure().run).status()["state"] == "failed"
    shard.write_bytes(whole)
    assert watch().train(configure(dataset=folder, epochs=1, **BRIEF)).status == "done"


def test_a_shard_that_was_damaged_while_a_run_stood_still_stops_it_and_loses_nothing(
    stopped_at_ten, configure, watch, dataset, tmp_path, whole_run
):
    folder = tmp_path / "pairs"
    shutil.copytree(dataset, folder)
    shutil.copytree(stopped_at_ten, configure().run)
    damage(folder / "shard-00000.safetensors", "flipped", 0)
    with pytest.raises(BadInput, match="is damaged"):
        watch().train(configure(dataset=folder, **BRIEF))
    assert load_newest(configure().run / ".checkpoints")[0].step == 10
    result = watch().train(configure(**BRIEF))
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("name", ["text-00000.safetensors", "pairs.safetensors"])
def test_a_damaged_file_of_captions_or_of_pairs_stops_a_run_before_its_first_step(
    configure, watch, build_pairs, name, kind
):
    folder = build_pairs(text={"tokens": 2, "dim": 8, "pooled": 0, "fingerprint": "x"})
    damage(folder / name, kind, 1)
    watcher = watch()
    words = rf"{name} .* (is damaged|must have \d+ bytes)|lacks its file {name}"
    with pytest.raises(BadInput, match=words) as said:
        watcher.train(configure(dataset=folder, **BRIEF))
    assert watcher.steps == [] and "\n" not in str(said.value)


# ---- disks ----------------------------------------------------------------------------------------------------------


def tiny_checkpoint(step: int, numbers: int) -> Checkpoint:
    value = {"w": torch.full((numbers,), float(step))}
    return Checkpoint(step, value, value, {"w/exp_avg": value["w"]}, {})


def test_a_disk_that_is_full_at_any_byte_of_a_checkpoint_leaves_the_one_before(small_disk):
    disk = small_disk("256k")
    folder = disk / "checkpoints"
    checkpoints.save(folder, tiny_checkpoint(5, 4096), keep=1)
    refused = 0
    for free in range(0, 96, 8):  # in KiB; the second one needs 3 x 16 and some
        with open(disk / "filler", "wb", buffering=0) as file:
            stat = os.statvfs(disk)
            file.write(bytes(max(stat.f_bavail * stat.f_frsize - free * 1024, 0)))
        try:
            checkpoints.save(folder, tiny_checkpoint(10, 4096), keep=1)
        except BadInput as error:
            refused += 1
            assert "the checkpoint could not be written, the older ones are whole" in str(error)
            assert "\n" not in str(error) and os.listdir(folder) == ["step-00000005"]
        found, passed_over = load_newest(folder)
        assert passed_over == [] and found.step in (5, 10)
        (disk / "filler").unlink()
        if found.step == 10:
            break
    assert refused > 2 and found.step == 10


def test_checkpoints_that_turn_read_only_in_mid_run_are_one_sentence_and_it_goes_on_later(
    configure, watch, whole_run, read_only
):
    class Meddler(watch):
        release = None

        def on_step(self, step, *given):
            super().on_step(step, *given)
            if step == 6:
                Meddler.release = read_only(configure().run / ".checkpoints")

    with pytest.raises(BadInput, match=r"step-00000008: the checkpoint could not be written.*Read-only file") as caught:
        Meddler().train(configure(**BRIEF))
    assert "\n" not in str(caught.value)
    assert RunFolder(configure().run).status()["state"] == "failed"
    assert load_newest(configure().run / ".checkpoints")[0].step == 4
    Meddler.release()
    result = watch().train(configure(**BRIEF))
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


def test_a_run_in_a_read_only_folder_is_one_sentence_and_stays_as_it_was(
    stopped_at_ten, configure, watch, whole_run, read_only
):
    run = configure().run
    shutil.copytree(stopped_at_ten, run)
    release = read_only(run)
    with pytest.raises(BadInput, match=r"Run folder .*run: cannot be written \(Read-only file system\)"):
        watch().train(configure(**BRIEF))
    release()
    assert load_newest(run / ".checkpoints")[0].step == 10
    assert watch().train(configure(**BRIEF)).refiner.read_bytes() == whole_run[0].refiner.read_bytes()
    read_only(run)
    assert watch().train(configure(**BRIEF)).status == "reused"  # what is finished needs no writing


def test_a_checkpoint_that_cannot_be_renamed_is_still_passed_over(stopped_at_ten, configure, read_only, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(stopped_at_ten / ".checkpoints", folder)
    damage(folder / "step-00000010" / "ema.safetensors", "cut", 0)
    read_only(folder)
    found, said = checkpoints.take_up(folder, load_newest(folder)[0].state["run"], load_newest(folder)[0].weights)
    assert found.step == 8 and len(said) == 1 and "It is now called" not in said[0]
