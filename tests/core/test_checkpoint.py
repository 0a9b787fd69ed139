"""Checkpoints: whole or not there, and exact enough that training goes on bit for bit."""

import os

import pytest
import torch
from torch import nn

from training import checkpoint as checkpoints
from training.checkpoint import Checkpoint
from training.errors import BadInput


def state(step, fill=None):
    value = torch.full((2, 3), float(step if fill is None else fill))
    return Checkpoint(step, {"w": value}, {"w": value / 2}, {"w/exp_avg": value * 2}, {"seconds": 1.5, "scaler": {}})


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def steps(folder):
    return [int(path.name.removeprefix("step-")) for path in checkpoints.list_steps(folder)]


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


@pytest.mark.parametrize("name", ["weights.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json"])
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
    assert "\n" not in passed_over[0]
    if damage == "cut" and name != "state.json":
        assert f"{name} has " in passed_over[0] and "bytes instead of" in passed_over[0]


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"files": {}}', "null"])
def test_a_state_of_another_kind_is_passed_over(folder, text):
    for step in (5, 10):
        checkpoints.save(folder, state(step), keep=3)
    (folder / "step-00000010" / "state.json").write_text(text)
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
    files = ["ema.safetensors", "optimizer.safetensors", "state.json", "weights.safetensors"]
    assert seen == [(files, False)] and len(synced) == 4


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


# ---- the optimizer --------------------------------------------------------------------------------------------------


def loop(net, optimizer, first, last):
    for k in range(first, last):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(k))
        (net(x) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fresh(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 2))
    kernels, others = [p for p in net.parameters() if p.ndim > 1], [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": kernels, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return net, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99), **options)


@pytest.mark.parametrize("fused", [False, True])
def test_training_goes_on_bit_for_bit_from_a_checkpoint(folder, fused):
    whole, optimizer = fresh(fused=fused)
    loop(whole, optimizer, 0, 20)

    first, optimizer = fresh(fused=fused)
    loop(first, optimizer, 0, 8)
    names = {p: n for n, p in first.named_parameters()}
    tensors = checkpoints.optimizer_tensors(optimizer, names)
    checkpoints.save(folder, Checkpoint(8, first.state_dict(), {}, tensors, {}), keep=1)

    second, optimizer = fresh(fused=fused)
    found, _ = checkpoints.load_newest(folder)
    second.load_state_dict(found.weights)
    checkpoints.restore_optimizer(optimizer, dict(second.named_parameters()), found.optimizer)
    loop(second, optimizer, 8, 20)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))

    forgetful, optimizer = fresh(fused=fused)  # the moments do matter: without them the end is another
    forgetful.load_state_dict(found.weights)
    loop(forgetful, optimizer, 8, 20)
    assert not torch.equal(forgetful[0].weight, whole[0].weight)


@pytest.mark.parametrize("options, place", [({}, "cpu"), ({"capturable": True}, "meta")])
def test_the_step_counter_goes_where_the_optimizer_reads_it(options, place):
    """On a GPU a fused AdamW keeps it there; the meta device stands in for one."""
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    optimizer = torch.optim.AdamW([parameter], **options)
    stored = {"w/step": torch.tensor(3.0), "w/exp_avg": torch.zeros(2)}
    checkpoints.restore_optimizer(optimizer, {"w": parameter}, stored)
    state = optimizer.state[parameter]
    assert state["step"].device.type == place and state["exp_avg"].device.type == "meta"


def test_an_optimizer_that_has_not_stepped_yet_is_saved_too(folder):
    net, optimizer = fresh()
    names = {p: n for n, p in net.named_parameters()}
    tensors = checkpoints.optimizer_tensors(optimizer, names)
    checkpoints.save(folder, Checkpoint(0, net.state_dict(), {}, tensors, {}), keep=1)
    found, passed_over = checkpoints.load_newest(folder)
    assert found.step == 0 and found.optimizer == {} and passed_over == []
