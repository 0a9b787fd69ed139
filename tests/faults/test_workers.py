"""A loader process that fails stops the whole run with its own error; a run that is stopped goes on with new ones."""

import multiprocessing
import os
import signal
import time

import pytest

from training.data.batches import BatchSource
from training.errors import BadInput, TrainingFailed
from training.run.checkpoints.checkpoint import load_newest
from training.run.run_folder import RunFolder

WORKERS = {"data__workers": 2, "validation__pictures": 0}


@pytest.fixture
def spoil(monkeypatch):
    """spoil(6, action) runs `action` in place of reading batch 6; loader processes are forks and have it too."""
    get = BatchSource.__getitem__

    def at(index, action):
        monkeypatch.setattr(BatchSource, "__getitem__", lambda self, i: action() if i == index else get(self, i))
        return monkeypatch.undo

    return at


def fail(error):
    def action():
        raise error

    return action


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "error, kind, said",
    [
        (BadInput("The file x cannot be read: y."), BadInput, r"^The file x cannot be read: y\.$"),
        (ValueError("two\nlines"), TrainingFailed, "^Batch 6 could not be read: ValueError: two lines; "),
        (MemoryError("no room"), TrainingFailed, "^Batch 6 could not be read: MemoryError: no room; "),
    ],
)
def test_what_one_raises_stops_the_run_as_it_is(configure, watch, spoil, whole_run, error, kind, said, workers):
    mend = spoil(6, fail(error))
    watcher = watch()
    with pytest.raises(kind, match=said) as caught:
        watcher.train(configure(data__workers=workers, validation__pictures=0))
    assert "\n" not in str(caught.value)
    assert watcher.steps == [1, 2, 3, 4, 5, 6]
    status = RunFolder(configure().run).status()
    assert (status["state"], status["step"], status["message"]) == ("failed", 6, str(caught.value))
    assert load_newest(configure().run / ".checkpoints")[0].step == 4
    mend()
    result = watch().train(configure(**WORKERS))
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
@pytest.mark.parametrize("after", [0, 2], ids=["while_a_step_computes", "while_the_run_waits_for_it"])
def test_one_that_is_killed_stops_the_run_with_a_sentence(configure, watch, spoil, whole_run, after):
    parent = os.getpid()

    def die():
        assert os.getpid() != parent
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)

    mend = spoil(6, die)
    with pytest.raises(TrainingFailed, match="A loader process was ended from outside") as caught:
        watch().train(configure(**WORKERS))
    assert multiprocessing.active_children() == []  # though the traceback of `caught` is still held
    assert "\n" not in str(caught.value)
    assert RunFolder(configure().run).status()["state"] == "failed"
    mend()
    result = watch().train(configure(**WORKERS))
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


def test_the_command_line_goes_on_with_its_loader_processes_to_the_same_bytes(nursery, configure, whole_run):
    config = configure(**WORKERS)
    path = config.run.parent / "run.json"
    path.write_text(config.to_json())
    for stop in (3, 7):
        assert nursery.command_line(["train", "--config", str(path)], interrupt_at=stop).code == 130
        assert load_newest(config.run / ".checkpoints")[0].step == stop
    last = nursery.command_line(["train", "--config", str(path)])
    assert last.code == 0 and "Resumed at step 7 of 12" in last.said
    assert (config.run / "refiner.safetensors").read_bytes() == whole_run[0].refiner.read_bytes()


def test_no_loader_process_outlives_a_run_that_failed(configure, watch, spoil):
    spoil(6, fail(BadInput("broken")))
    with pytest.raises(BadInput, match="broken"):
        watch().train(configure(**WORKERS))
    assert multiprocessing.active_children() == []
