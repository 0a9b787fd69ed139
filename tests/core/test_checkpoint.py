"""Checkpoints: whole or not there, and exact enough that training goes on bit for bit."""

import json
import os
import shutil
import subprocess

import pytest
import torch
from torch import nn
from torch.nn import Linear
from torch.optim.swa_utils import AveragedModel

from tests.core.small_checkpoints import RUN, state, steps
from training.errors import BadInput
from training.objectives.plain_names import plain_names
from training.run.checkpoints import checkpoint as checkpoints
from training.run.checkpoints.checkpoint import Checkpoint
from training.storage.checksums import write_checksums


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def test_a_checkpoint_comes_back_as_it_was_saved(folder):
    checkpoints.save(folder, state(7), keep=2)
    found, passed_over = checkpoints.load_newest(folder)
    assert found.step == 7 and passed_over == []
    assert found.state["seconds"] == 1.5 and found.state["scaler"] == {}
    assert torch.equal(found.weights["w"], torch.full((2, 3), 7.0))
    assert torch.equal(found.ema["w"], torch.full((2, 3), 3.5))
    assert torch.equal(found.optimizer["w/exp_avg"], torch.full((2, 3), 14.0))


def test_only_the_newest_are_kept(folder):
    for step in (5, 10, 15, 100):
        checkpoints.save(folder, state(step), keep=2)
    assert steps(folder) == [15, 100]
    assert sorted(os.listdir(folder)) == ["step-00000015", "step-00000100"]  # and nothing hidden


def test_no_folder_and_an_empty_one_hold_no_checkpoint(folder):
    assert checkpoints.load_newest(folder) == (None, [])
    folder.mkdir()
    assert checkpoints.load_newest(folder) == (None, [])


@pytest.mark.parametrize("name", [*sorted(checkpoints.FILES), "SHA256SUMS"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_sentence(folder, name, damage):
    for step in (5, 10):
        checkpoints.save(folder, state(step), keep=3)
    path = folder / "step-00000010" / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2] if damage == "cut" else b"")
    found, passed_over = checkpoints.load_newest(folder)
    assert found.step == 5
    assert len(passed_over) == 1 and passed_over[0].startswith("step-00000010 passed over: ")
    assert "\n" not in passed_over[0] and name in passed_over[0]


def test_a_flipped_bit_is_found_wherever_it_is(folder):
    """In every seventh byte of each file, and in every single one of the seal, its names and blanks included."""
    path = checkpoints.save(folder, state(5), keep=1)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for place in range(0, len(whole), 1 if file.name == "SHA256SUMS" else 7):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << place % 8
            file.write_bytes(damaged)
            assert checkpoints.load_newest(folder)[0] is None, (file.name, place)
        file.write_bytes(whole)
    assert checkpoints.load_newest(folder)[0].step == 5


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed")
def test_the_seal_is_what_sha256sum_reads(folder):
    path = checkpoints.save(folder, state(5), keep=1)
    check = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=path, capture_output=True, text=True)
    assert check.returncode == 0 and check.stdout.count(": OK") == 4 == len(list(path.iterdir())) - 1


def reseal(path):
    (path / "SHA256SUMS").unlink(missing_ok=True)
    write_checksums(path)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"files": {}}', "null"])
def test_a_state_of_another_kind_is_passed_over(folder, text):
    for step in (5, 10):
        checkpoints.save(folder, state(step), keep=3)
    (folder / "step-00000010" / "state.json").write_text(text)
    reseal(folder / "step-00000010")
    found, passed_over = checkpoints.load_newest(folder)
    assert found.step == 5 and len(passed_over) == 1


def test_where_all_are_damaged_there_is_none(folder):
    for step in (5, 10):
        checkpoints.save(folder, state(step), keep=3)
        (folder / f"step-{step:08d}" / "state.json").write_text("")
    found, passed_over = checkpoints.load_newest(folder)
    assert found is None and len(passed_over) == 2


def test_what_a_kill_left_half_written_is_never_read(folder):
    checkpoints.save(folder, state(5), keep=2)
    half = folder / ".step-00000010.partial"
    half.mkdir()
    (half / "weights.safetensors").write_bytes(b"half")
    assert checkpoints.load_newest(folder)[0].step == 5
    checkpoints.save(folder, state(10), keep=2)
    assert checkpoints.load_newest(folder)[0].step == 10 and not half.exists()


def test_the_rename_is_the_last_thing(folder, monkeypatch):
    """All files are whole and on the disk before the folder gets its name."""
    seen, replace, fsync, synced = [], os.replace, os.fsync, []

    def look(source, target):
        seen.append((sorted(os.listdir(source)), os.path.exists(target)))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), fsync(fd)))
    checkpoints.save(folder, state(5), keep=2)
    files = ["SHA256SUMS", "ema.safetensors", "optimizer.safetensors", "state.json", "weights.safetensors"]
    # the five files, their folder, and after the rename the folder above it
    assert seen == [(files, False)] and len(synced) == 7


def test_a_whole_checkpoint_of_the_same_step_is_not_touched(folder):
    """A kill between its removal and the rename would lose the only one; a run has the same content there anyway."""
    kept = checkpoints.save(folder, state(5, fill=1), keep=1)
    before = (kept / "weights.safetensors").stat().st_ino
    checkpoints.save(folder, state(5, fill=2), keep=1)
    assert (kept / "weights.safetensors").stat().st_ino == before
    assert float(checkpoints.load_newest(folder)[0].weights["w"][0, 0]) == 1


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(folder):
    damaged = checkpoints.save(folder, state(5, fill=1), keep=2) / "weights.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    checkpoints.save(folder, state(5, fill=2), keep=2)
    assert steps(folder) == [5] and float(checkpoints.load_newest(folder)[0].weights["w"][0, 0]) == 2


def test_a_full_disk_leaves_the_older_checkpoint_as_it_was(small_disk):
    folder = small_disk("128k") / "checkpoints"
    checkpoints.save(folder, state(5), keep=1)
    large = Checkpoint(10, {"w": torch.zeros(50_000)}, {}, {}, {})
    with pytest.raises(BadInput, match="step-00000010: the checkpoint could not be written, the older ones are whole"):
        checkpoints.save(folder, large, keep=1)
    assert os.listdir(folder) == ["step-00000005"]
    assert checkpoints.load_newest(folder)[0].step == 5


def test_the_best_stays_beside_the_newest(folder):
    for step, best in ((5, 5), (10, 10), (15, 10), (20, 10), (25, 25), (30, 25)):
        checkpoints.save(folder, state(step), keep=1, best=best)
        assert steps(folder) == sorted({step, best})


def test_a_damaged_newer_one_does_not_crowd_out_a_valid_one(folder):
    """Of step 10, damaged, and a run that goes on from 5 and is stopped at 7, the one of 7 must stay."""
    for step in (5, 10):
        checkpoints.save(folder, state(step), keep=2)
    (folder / "step-00000010" / "weights.safetensors").write_bytes(b"")
    found, said = checkpoints.take_up(folder, RUN, state(0).weights)
    assert found.step == 5 and said[0].startswith("step-00000010 passed over: weights.safetensors is damaged")
    assert said[0].endswith("It is now called step-00000010.passed-over.")
    checkpoints.save(folder, state(7), keep=1)
    assert steps(folder) == [7] and checkpoints.take_up(folder, RUN, state(0).weights)[0].step == 7
    checkpoints.save(folder, state(10), keep=2)
    assert steps(folder) == [7, 10] and checkpoints.take_up(folder, RUN, state(0).weights)[1] == []


def test_a_newer_one_of_whatever_kind_survives_the_pruning(folder):
    checkpoints.save(folder, state(10), keep=1)
    checkpoints.save(folder, state(5), keep=1)
    assert steps(folder) == [5, 10]


def test_what_a_kill_left_half_written_or_half_deleted_is_cleared_when_the_run_is_taken_up(folder):
    checkpoints.save(folder, state(5), keep=2)
    for name in (".step-00000010.partial", ".step-00000001.partial-removal"):
        (folder / name).mkdir()
        (folder / name / "weights.safetensors").write_bytes(b"half")
    assert checkpoints.take_up(folder, RUN, state(0).weights)[0].step == 5
    assert os.listdir(folder) == ["step-00000005"]


def test_a_removal_that_is_killed_leaves_nothing_under_the_name(folder, monkeypatch):
    checkpoints.save(folder, state(5), keep=1)
    rmtree = shutil.rmtree

    def killed(path, **options):
        if os.path.exists(path):
            (path / "weights.safetensors").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(folder, state(10), keep=1)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert steps(folder) == [10]
    assert checkpoints.take_up(folder, RUN, state(0).weights)[1] == []


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weights.pt", "weights.CKPT", "optimizer.bin", "x.pkl"])
def test_a_pickle_is_named_and_never_opened(folder, name, monkeypatch):
    for step in (5, 10):
        checkpoints.save(folder, state(step), keep=2)
    (folder / "step-00000010" / "weights.safetensors").unlink()
    for place in (folder, folder / "step-00000005", folder / "step-00000010"):
        (place / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    monkeypatch.setattr(torch, "load", pytest.fail)
    opened, plain = [], open
    monkeypatch.setattr("builtins.open", lambda path, *given, **kw: opened.append(path) or plain(path, *given, **kw))
    found, said = checkpoints.take_up(folder, RUN, state(0).weights)
    assert found.step == 5
    assert "weights.safetensors is missing" in said[0] and f"{name} was not opened: it is a pickle" in said[0]
    assert [text.split(" was not")[0] for text in said[1:]] == [name, f"step-00000005/{name}"]
    assert not [path for path in opened if str(path).endswith(name)]


def test_a_pickle_under_the_name_of_a_tensor_file_is_refused(folder):
    path = checkpoints.save(folder, state(5), keep=1)
    torch.save({"w": torch.zeros(2, 3)}, path / "weights.safetensors")
    assert "weights.safetensors is damaged" in checkpoints.load_newest(folder)[1][0]
    reseal(path)  # by somebody who means it
    found, (said,) = checkpoints.load_newest(folder)
    assert found is None and "\n" not in said
    assert said.startswith("step-00000005 passed over: its content cannot be read (")


def test_one_of_the_format_before_is_passed_over_with_a_sentence(folder):
    path = checkpoints.save(folder, state(5), keep=1)
    (path / "SHA256SUMS").unlink()
    sizes = {f"{name}.safetensors": 1 for name in checkpoints.TENSOR_FILES}
    (path / "state.json").write_text(json.dumps({"step": 5, "files": sizes, "seconds": 1.0, "scaler": {}}))
    found, (said,) = checkpoints.load_newest(folder)
    assert found is None and said == (
        "step-00000005 passed over: it is of an earlier format, without checksums, and this version does not read it."
    )


@pytest.mark.parametrize(
    "change, said",
    [
        ({"version": 3}, "expected ref2v-checkpoint version 2, got ref2v-checkpoint version 3"),
        ({"format": "other"}, "expected ref2v-checkpoint version 2, got other version 2"),
        ({"step": 6}, "it is step 6 under another name"),
        ({"run": {**RUN, "data": "xyz"}}, "it is of another run (data 'xyz' -> 'abc')"),
        (
            {"run": {**RUN, "identity": {"seed": 1, "data": {"crop": 8}}}},
            "it is of another run (identity.data.crop 8 -> None; identity.seed 1 -> 0)",
        ),
    ],
)
def test_one_of_another_kind_or_run_is_passed_over_by_name(folder, change, said):
    path = checkpoints.save(folder, state(5), keep=1)
    (path / "state.json").write_text(json.dumps({**json.loads((path / "state.json").read_text()), **change}))
    reseal(path)
    found, passed_over = checkpoints.take_up(folder, RUN, state(0).weights)
    assert found is None and passed_over[0].startswith(f"step-00000005 passed over: {said}.")


@pytest.mark.parametrize(
    "like, said",
    [
        ({"w": torch.zeros(2, 4)}, "w is [2, 3] instead of [2, 4]"),
        ({"w": torch.zeros(2, 3), "b": torch.zeros(1)}, "b is in the network alone"),
        ({"v": torch.zeros(2, 3)}, "v is in the network alone"),
    ],
)
def test_one_of_another_network_is_passed_over_by_the_name_of_a_weight(folder, like, said):
    checkpoints.save(folder, state(5), keep=1)
    found, (passed_over,) = checkpoints.load_newest(folder, RUN, like)
    assert found is None and passed_over == f"step-00000005 passed over: it is of another network: {said}."


# ---- names ----------------------------------------------------------------------------------------------------------


def test_no_wrapper_leaves_its_prefix_in_a_checkpoint(folder):
    class Compiled(nn.Module):
        """As torch.compile names things; the real one takes half a minute to import."""

        def __init__(self, inner):
            super().__init__()
            self._orig_mod = inner

    net = nn.Sequential(Linear(3, 4), Linear(4, 2))
    bare = set(net.state_dict())
    parallel = AveragedModel(Compiled(nn.Sequential(net[0], Compiled(net[1]))))  # DDP too calls what it wraps `module`
    wrapped = dict(parallel.named_parameters())
    assert "module._orig_mod.1._orig_mod.weight" in wrapped
    optimizer = {f"{name}/exp_avg": tensor for name, tensor in wrapped.items()}
    checkpoints.save(folder, Checkpoint(5, wrapped, wrapped, optimizer, {}), keep=1)
    found, _ = checkpoints.load_newest(folder)
    assert set(found.weights) == set(found.ema) == bare
    assert set(found.optimizer) == {f"{name}/exp_avg" for name in bare}
    net.load_state_dict(found.weights)


def test_a_prefix_in_the_middle_is_a_name_like_any_other_unless_it_is_the_compilers():
    assert plain_names({"a.module.w": 1, "module": 2, "module.module.w": 3, "a._orig_mod.b._orig_mod.w": 4}) == {
        "a.module.w": 1, "module": 2, "w": 3, "a.b.w": 4,
    }
    with pytest.raises(BadInput, match="Two tensors would both be called 'w'"):
        plain_names({"w": 1, "module.w": 2})
