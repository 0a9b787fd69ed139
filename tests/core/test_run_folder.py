"""A run's folder in the hands of others: a second process, a damaged file, a configuration that was wrong at first."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from training import run_folder
from training.errors import BadInput
from training.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
BRIEF = {"validation__pictures": 0}
HOLDER = """
import sys, time
from pathlib import Path
from training.file_lock import hold_lock
held = hold_lock(Path(sys.argv[1]))
print("held" if held else "refused", flush=True)
time.sleep(600)
"""


def one_sentence(caught) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def copy(configure, whole_run):
    """The finished run under another name, and its bytes."""
    folder = configure().run
    shutil.copytree(whole_run[0].folder, folder)
    return folder, (folder / "refiner.safetensors").read_bytes()


# ---------------------------------------------------------------------------------------------------- two at once


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_second_process_is_refused_until_the_first_one_ends_however_it_ends(configure, watch):
    folder = configure().run
    folder.mkdir(parents=True)
    lock = str(folder / ".lock")
    other = subprocess.Popen([sys.executable, "-c", HOLDER, lock], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline().strip() == "held"
        with pytest.raises(BadInput, match="is being trained by another process") as caught:
            watch().train(configure(epochs=1, **BRIEF))
        one_sentence(caught)
        with pytest.raises(BadInput, match="is being trained by another process"):
            RunFolder(folder).move_aside()
        assert [path.name for path in folder.iterdir()] == [".lock"]
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert watch().train(configure(epochs=1, **BRIEF)).status == "done"


def test_two_runs_of_one_process_do_not_share_a_folder_either(configure, watch):
    config = configure(epochs=1, **BRIEF)

    class Meddler(watch):
        said = ""

        def on_step(self, step, *given):
            super().on_step(step, *given)
            if step == 2:
                with pytest.raises(BadInput) as caught:
                    watch().train(config)
                Meddler.said = one_sentence(caught)

    assert Meddler().train(config).status == "done"
    assert "is being trained by another process" in Meddler.said


# ------------------------------------------------------------------------------------------------- damaged afterwards


@pytest.mark.parametrize("keep", [0, 5000, -1])
def test_a_finished_run_whose_refiner_is_damaged_is_trained_again(copy, configure, watch, keep):
    folder, whole = copy
    (folder / "refiner.safetensors").write_bytes(whole[:keep])
    watcher = watch()
    assert watcher.train(configure()).status == "done"
    assert watcher.steps[0] == 1
    assert (folder / "refiner.safetensors").read_bytes() == whole


@pytest.mark.parametrize("text", [None, "", "{bad", "[]"])
def test_a_report_that_is_gone_or_damaged_is_measured_again_without_training(copy, configure, watch, text):
    folder, whole = copy
    (folder / "report.json").unlink()
    if text is not None:
        (folder / "report.json").write_text(text)
    watcher = watch()
    result = watcher.train(configure())
    assert result.status == "done" and watcher.steps == []
    assert (folder / "refiner.safetensors").read_bytes() == whole
    assert json.loads((folder / "report.json").read_text())["evaluation"]["measures"]


@pytest.mark.parametrize("text", ["", "[]", '"x"', "null", "3"])
def test_a_status_that_is_none_counts_as_not_finished(copy, configure, watch, text):
    folder, whole = copy
    (folder / "status.json").write_text(text)
    assert watch().train(configure()).status == "done"
    assert (folder / "refiner.safetensors").read_bytes() == whole


@pytest.mark.parametrize("text", ["", "[]", '"x"', "null", '{"identity": 3}', '{"identity": null, "data": 1}'])
def test_a_configuration_that_is_none_is_refused_in_one_sentence(copy, configure, watch, text):
    folder, whole = copy
    (folder / "config.json").write_text(text)
    with pytest.raises(BadInput, match=r"expected an empty folder|exists with another configuration") as caught:
        watch().train(configure())
    one_sentence(caught)
    assert (folder / "refiner.safetensors").read_bytes() == whole


def test_a_kill_while_a_run_begins_does_not_make_its_folder_a_stranger(configure, watch):
    folder = configure().run
    folder.mkdir(parents=True)
    (folder / ".lock").touch()
    (folder / "config.json.partial").write_text('{"ide')
    assert watch().train(configure(epochs=1, **BRIEF)).status == "done"


def test_a_finished_run_is_used_again_where_nothing_can_be_written(copy, configure, watch, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_folder, "_write_json", refuse)
    monkeypatch.setattr(run_folder, "hold_lock", refuse)
    assert watch().train(configure()).status == "reused"


def test_a_folder_that_cannot_be_renamed_is_one_sentence(copy, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(run_folder.os, "replace", refuse)
    with pytest.raises(BadInput, match=r"cannot be kept as .*previous-1 \(Operation not permitted\)") as caught:
        RunFolder(copy[0]).move_aside()
    one_sentence(caught)


# -------------------------------------------------------------------------------------------------- wrong at first


def test_memory_that_does_not_do_is_one_sentence_and_a_smaller_run_may_take_the_name(configure, watch, monkeypatch):
    from training import objective

    def allocate(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(objective, "build_unet", allocate)
        with pytest.raises(BadInput, match="memory is not enough .* smaller batch_size") as caught:
            watch().train(configure(**BRIEF))
    one_sentence(caught)
    assert RunFolder(configure().run).status()["state"] == "failed"
    result = watch().train(configure(epochs=1, data__batch_size=2, **BRIEF))
    assert result.status == "done"
    # from here on there is something to lose
    with pytest.raises(BadInput, match="exists with another configuration"):
        watch().train(configure(epochs=2, data__batch_size=2, **BRIEF))


def test_a_fault_that_nobody_foresaw_is_not_hidden_but_told_in_the_status(configure, watch, monkeypatch):
    from training import objective

    def fail(*_, **__):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(objective, "batch_loss", fail)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        watch().train(configure(**BRIEF))
    assert RunFolder(configure().run).status()["state"] == "failed"


def test_a_device_without_numbers_is_no_device(configure, watch):
    with pytest.raises(BadInput, match="device: expected a device of this machine or auto, got 'meta'"):
        watch().train(configure(device="meta"))
