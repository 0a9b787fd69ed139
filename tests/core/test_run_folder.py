"""A run's folder in the hands of others: a second process, a damaged file, a configuration that was wrong at first."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from training.data import index
from training.errors import BadInput
from training.run import run_folder
from training.run.checkpoints.export import export_checkpoint
from training.run.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
BRIEF = {"validation__pictures": 0}
HOLDER = """
import sys, time
from pathlib import Path
from training.storage.file_lock import hold_lock
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
    with pytest.raises(BadInput, match=r"its config.json is empty or damaged|exists with another config") as caught:
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
    from training.objectives.residual import objective

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


def test_a_run_without_memory_is_told_so_on_a_torch_that_has_fewer_exceptions(configure, watch, monkeypatch):
    """torch.OutOfMemoryError came with torch 2.5."""
    import torch

    from training.objectives.residual import objective

    def allocate(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(objective, "build_unet", allocate)
    monkeypatch.delattr(torch, "OutOfMemoryError")
    with pytest.raises(BadInput, match="memory is not enough") as caught:
        watch().train(configure(**BRIEF))
    one_sentence(caught)
    assert RunFolder(configure().run).status()["state"] == "failed"


def test_a_fault_that_nobody_foresaw_is_not_hidden_but_told_in_the_status(configure, watch, monkeypatch):
    from training.objectives.residual import objective

    def fail(*_, **__):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(objective, "batch_loss", fail)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        watch().train(configure(**BRIEF))
    assert RunFolder(configure().run).status()["state"] == "failed"


def test_a_device_without_numbers_is_no_device(configure, watch):
    with pytest.raises(BadInput, match="device: expected a device of this machine or auto, got 'meta'"):
        watch().train(configure(device="meta"))


# --------------------------------------------------------------------------------- where whole states are, then and now


def test_whole_states_are_in_a_hidden_folder_so_that_no_list_of_models_shows_them(configure, watch):
    result = watch().train(configure(epochs=1, **BRIEF))
    models = [path.relative_to(result.folder) for path in result.folder.rglob("*.safetensors")]
    assert [path.name for path in models if not path.parts[0].startswith(".")] == ["refiner.safetensors"]
    assert len(models) > 3


def as_begun_before(folder):
    (folder / ".checkpoints").rename(folder / "checkpoints")


def test_a_run_that_was_begun_before_they_were_hidden_goes_on(configure, watch, whole_run):
    assert watch(stop_after=6).train(configure(**BRIEF)).status == "stopped"
    as_begun_before(configure().run)
    watcher = watch()
    result = watcher.train(configure(**BRIEF))
    assert watcher.steps == [7, 8, 9, 10, 11, 12]
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()
    assert not (result.folder / "checkpoints").exists() and list((result.folder / ".checkpoints").glob("step-*"))


def test_a_run_that_an_older_version_took_up_in_between_goes_on_from_the_newest_state(configure, watch, whole_run):
    folder = configure().run
    assert watch(stop_after=6).train(configure(**BRIEF)).status == "stopped"
    (folder / "checkpoints").mkdir()
    (folder / ".checkpoints" / "step-00000006").rename(folder / "checkpoints" / "step-00000006")
    watcher = watch()
    result = watcher.train(configure(**BRIEF))
    assert watcher.steps[0] == 7 and not (folder / "checkpoints").exists()
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


def test_a_finished_run_from_before_is_used_and_its_states_are_hidden(copy, configure, watch):
    as_begun_before(copy[0])
    assert watch().train(configure()).status == "reused"
    assert not (copy[0] / "checkpoints").exists() and list((copy[0] / ".checkpoints").glob("step-*"))


def test_a_run_from_before_that_is_moved_aside_has_its_states_hidden(copy):
    as_begun_before(copy[0])
    aside = RunFolder(copy[0]).move_aside()
    assert not (aside / "checkpoints").exists() and list((aside / ".checkpoints").glob("step-*"))


def test_a_run_from_before_is_exported_as_it_lies(copy, tmp_path):
    as_begun_before(copy[0])
    export_checkpoint(copy[0], "last", tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").is_file() and (copy[0] / "checkpoints").is_dir()


# ------------------------------------------------------------------------------------------------------- which file


def test_a_dataset_that_cannot_be_read_is_what_the_sentence_names(configure, watch, monkeypatch):
    hash_file = index.sha256_file

    def fail(path):
        if "shard" not in str(path):
            return hash_file(path)
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(index, "sha256_file", fail)
    with pytest.raises(BadInput, match=r"The file .*shard.* of the dataset .* cannot be read: Input/output") as it:
        watch().train(configure(data__verify="full", **BRIEF))  # other tests have found it whole
    one_sentence(it)
    assert RunFolder(configure().run).status()["message"] == str(it.value)


@pytest.mark.parametrize(
    "place, said",
    [("/mnt/pairs/x", "^/mnt/pairs/x could not be read or written"), ("run", "^Run folder .*: writing x failed")],
)
def test_the_file_at_fault_is_named_wherever_it_is(configure, watch, monkeypatch, place, said):
    from training.objectives.residual import objective

    def fail(*_, **__):
        path = configure().run / "x" if place == "run" else place
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(objective, "batch_loss", fail)
    with pytest.raises(BadInput, match=said) as caught:
        watch().train(configure(**BRIEF))
    one_sentence(caught)


def test_a_file_that_something_holds_for_a_moment_gets_its_name_all_the_same(configure, watch, monkeypatch, whole_run):
    """On Windows a virus scanner opens what has just been written, and nobody can rename it meanwhile."""
    import os

    rename, tries = os.replace, []

    def held(source, target):
        tries.append(str(target))
        if tries.count(str(target)) in (1, 2):
            raise PermissionError(13, "Access is denied")
        rename(source, target)

    monkeypatch.setattr(os, "replace", held)
    result = watch().train(configure(**BRIEF))
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()
    names = {Path(target).name for target in tries}
    assert {"refiner.safetensors", "config.json", "status.json", "step-00000012", "report.json"} <= names
    RunFolder(result.folder).move_aside()
    assert any(target.endswith(".previous-1") for target in tries)


def test_a_folder_that_cannot_be_written_is_not_waited_for(tmp_path, monkeypatch):
    import os

    from training.storage import files as whole_file

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", denied)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(whole_file.time, "sleep", lambda _: pytest.fail("waited"))
    with pytest.raises(PermissionError):
        whole_file.replace(tmp_path / "a", tmp_path / "b")
