"""Checkpoints written by a thread: the state at the call, in order, and a failure heard once."""

import time

import pytest
import torch

from tests.core.small_checkpoints import state, steps
from training.errors import BadInput
from training.run.checkpoints import checkpoint as checkpoints
from training.run.checkpoints.background import BackgroundSaver


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def slow_down(monkeypatch) -> list[int]:
    """Make writing take a while; gives the steps of the checkpoints as their writing begins."""
    save, began = checkpoints.save, []

    def slow(folder, checkpoint, keep, best=None):
        began.append(checkpoint.step)
        time.sleep(0.2)
        return save(folder, checkpoint, keep, best)

    monkeypatch.setattr(checkpoints, "save", slow)
    return began


@pytest.mark.parametrize("on_cpu", [True, False], ids=["written_as_it_lies_there", "copied_from_another_device"])
def test_what_is_saved_is_the_state_at_the_call(folder, monkeypatch, on_cpu):
    monkeypatch.setattr(checkpoints.Checkpoint, "on_cpu", lambda self: on_cpu)
    slow_down(monkeypatch)
    moving = state(5)
    with BackgroundSaver(folder, keep=2) as saver:
        saver.save(moving)
        saver.before_update()
        assert saver.is_writing() != on_cpu
        for tensors in (moving.weights, moving.ema, moving.optimizer):
            for tensor in tensors.values():
                tensor.fill_(-1)
    found, _ = checkpoints.load_newest(folder)
    assert torch.equal(found.weights["w"], torch.full((2, 3), 5.0))
    assert torch.equal(found.optimizer["w/exp_avg"], torch.full((2, 3), 10.0))


def test_the_block_ends_only_when_the_last_one_is_whole_and_they_come_in_their_order(folder, monkeypatch):
    began = slow_down(monkeypatch)
    with BackgroundSaver(folder, keep=2) as saver:
        for step in (5, 10, 10, 15):  # one that is there is not written twice
            saver.save(state(step))
        saver.check()
        assert began == [5, 10, 15] or began == [5, 10]
    assert steps(folder) == [10, 15] and began == [5, 10, 15]


@pytest.mark.parametrize("heard", ["check", "wait", "save", "end"])
def test_one_that_fails_is_heard_at_the_next_call_and_once(folder, heard, monkeypatch):
    def full(*_):
        raise BadInput("the disk is full")

    save = checkpoints.save
    monkeypatch.setattr(checkpoints, "save", full)
    with pytest.raises(BadInput, match="the disk is full"), BackgroundSaver(folder, keep=2) as saver:
        saver.save(state(5))
        saver._thread.join()
        if heard != "end":
            getattr(saver, heard)(*([state(10)] if heard == "save" else []))
            pytest.fail("not heard")
    monkeypatch.setattr(checkpoints, "save", save)
    saver.check()
    saver.save(state(5))  # it may be tried again
    saver.wait()
    assert steps(folder) == [5]


def test_where_training_fails_too_its_own_error_goes_on_and_the_checkpoints_is_logged(folder, monkeypatch, caplog):
    def full(*_):
        raise BadInput("the disk is full")

    monkeypatch.setattr(checkpoints, "save", full)
    with pytest.raises(ZeroDivisionError), BackgroundSaver(folder, keep=2) as saver:
        saver.save(state(5))
        raise ZeroDivisionError
    assert "the disk is full" in caplog.text
