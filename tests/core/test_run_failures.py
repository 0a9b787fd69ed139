"""When a run goes wrong: one sentence, a status that says so, and the checkpoints before it whole."""

import json

import pytest
import torch

from training.errors import BadInput, TrainingFailed
from training.objectives.residual import flow
from training.run.checkpoints.checkpoint import load_newest
from training.run.run_folder import RunFolder

BRIEF = {"validation__pictures": 0}


def status(folder):
    return json.loads((folder / "status.json").read_text())


def spoil_loss(monkeypatch, from_call, spoil):
    """From its `from_call`-th call on (from 1), the loss goes through `spoil`."""
    calls, loss = [], flow.loss_per_sample

    def spoilt(output, v, c_v, mask=None):
        calls.append(0)
        found = loss(output, v, c_v, mask)
        return spoil(found) if len(calls) >= from_call else found

    monkeypatch.setattr(flow, "loss_per_sample", spoilt)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda loss: loss * float("nan"),
        lambda loss: loss * float("inf"),
        lambda loss: loss + (loss - loss.detach()).abs().sqrt(),  # finite, but its gradient is not
    ],
    ids=["nan loss", "infinite loss", "nan gradient"],
)
def test_a_number_that_is_not_finite_stops_before_its_step(configure, watch, monkeypatch, whole_run, spoil):
    with monkeypatch.context() as patch:
        spoil_loss(patch, 7, spoil)
        watcher = watch()
        with pytest.raises(TrainingFailed, match=r"^Step 7: expected a finite loss and gradient, got loss .*kept"):
            watcher.train(configure(**BRIEF))
    folder = configure().run
    assert watcher.steps == [1, 2, 3, 4, 5, 6]
    assert status(folder)["state"] == "failed" and status(folder)["message"].startswith("Step 7: ")
    assert status(folder)["step"] == 6
    assert load_newest(folder / ".checkpoints")[0].step == 4
    assert not (folder / "refiner.safetensors").exists()
    # the cause mended, the run goes on from its last checkpoint to the end that it would have had
    result = watch().train(configure(**BRIEF))
    assert result.status == "done" and result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


def test_values_too_large_for_fp16_stop_the_run(configure, watch, build_pairs):
    folder = build_pairs(base_of=lambda z: z + 1e6)
    with pytest.raises(TrainingFailed, match="All 12 steps were skipped.*nothing was learnt"):
        watch().train(configure(dataset=folder, precision="fp16", **BRIEF))


def test_fp16_skips_a_step_that_overflows_and_gives_up_after_twenty(configure, watch, monkeypatch):
    class OneBad(torch.autograd.Function):
        """The identity; its gradient is infinite."""

        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient * float("inf")

    spoil_loss(monkeypatch, 1, OneBad.apply)
    watcher = watch()
    config = configure(precision="fp16", data__batch_size=1, data__crop=8, health__scale_floor=0, **BRIEF)
    with pytest.raises(TrainingFailed, match="Step 20: .*20 steps in a row were skipped") as caught:
        watcher.train(config)
    assert str(caught.value).endswith("kept: step-00000016.")
    assert "the gradient of the loss itself" in str(caught.value)
    assert status(config.run)["state"] == "failed" and status(config.run)["message"] == str(caught.value)
    kept = load_newest(config.run / ".checkpoints")[0]
    assert len(watcher.steps) == 19 and kept.step == 16
    assert kept.state["health"]["skipped"] == kept.state["health"]["in_a_row"] == 16
    assert [scale for _, scale in kept.state["health"]["history"]] == [65536 / 2**k for k in range(1, 17)]
    assert not kept.weights["conv_out.weight"].any()  # not one of those steps moved a weight
    assert not kept.ema["conv_out.weight"].any()


def test_a_disk_that_is_full_at_a_checkpoint_is_one_sentence(configure, watch, small_disk):
    run = small_disk("3m") / "run"
    with pytest.raises(BadInput, match="step-00000008: the checkpoint could not be written") as caught:
        watch().train(configure(run=run, **BRIEF))
    assert "\n" not in str(caught.value)
    assert status(run)["state"] == "failed" and "could not be written" in status(run)["message"]
    assert load_newest(run / ".checkpoints")[0].step == 4
    assert [path.name for path in (run / ".checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.parametrize("step", [2, 12])
def test_a_disk_that_fills_up_in_mid_training_is_one_sentence(configure, watch, small_disk, whole_run, step):
    disk = small_disk("12m")

    class Filler(watch):
        """Somebody else fills the disk to the last byte after `step`."""

        def on_step(self, now, *given):
            super().on_step(now, *given)
            if now == step:
                with open(disk / "filler", "wb", buffering=0) as file:
                    try:
                        while file.write(bytes(4096)):
                            pass
                    except OSError:
                        pass

    with pytest.raises(BadInput) as caught:
        Filler().train(configure(run=disk / "run", **BRIEF))
    assert "No space left on device" in str(caught.value) and "\n" not in str(caught.value)
    assert status(disk / "run").get("state") != "done"
    assert not (disk / "run" / "refiner.safetensors").exists()
    (disk / "filler").unlink()
    result = watch().train(configure(run=disk / "run", **BRIEF))
    assert result.status == "done" and result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


def test_a_disk_that_fills_up_between_two_lines_of_the_journal_is_one_sentence(configure, watch, monkeypatch):
    from training.run.report.journal import Journal

    def full(self, step, **values):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", full)
        with pytest.raises(BadInput, match=r"Run folder .*run: writing failed \(No space left on device\)"):
            watch().train(configure(**BRIEF))
    assert status(configure().run)["state"] == "failed" and "No space" in status(configure().run)["message"]


def test_a_disk_that_is_full_when_the_report_is_written_leaves_no_finished_run(configure, watch, monkeypatch):
    from training.run.report import report

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(report, "grid_picture", full)
        with pytest.raises(BadInput, match="No space left on device"):
            watch().train(configure(**BRIEF))
    assert status(configure().run)["state"] == "failed"
    assert watch().train(configure(**BRIEF)).status == "done"


def test_a_disk_that_is_full_from_the_start_is_one_sentence(configure, watch, small_disk):
    with pytest.raises(BadInput) as caught:
        watch().train(configure(run=small_disk("8k") / "run", **BRIEF))
    assert "No space left on device" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"refiner__shape": {"block_channels": [33]}}, r"refiner\.shape: .*transformer_depth"),
        (
            {
                "refiner__shape": {
                    "block_channels": [33], "transformer_depth": [0], "middle_depth": 0, "heads": [1],
                }
            },
            r"refiner\.shape: .*block_channels must be multiples of 32, got 33",
        ),
        (
            {
                "refiner__shape": {
                    "latent_channels": 4, "block_channels": [32], "transformer_depth": [0], "middle_depth": 0,
                    "heads": [1],
                }
            },
            r"refiner\.shape\.latent_channels: expected the dataset's 3, got 4",
        ),
        ({"device": "cuda:77"}, r"device: expected a device of this machine or auto, got 'cuda:77'"),
        ({"device": "toaster"}, r"device: expected a device of this machine or auto, got 'toaster'"),
        ({"data__mirror": True, "data__crop": 12, "refiner__base": "SD1.5"}, None),
    ],
)
def test_what_does_not_fit_is_said_before_a_folder_is_made(configure, watch, changes, said):
    if said is None:
        assert watch().train(configure(epochs=1, **BRIEF | changes)).status == "done"
        return
    with pytest.raises(BadInput, match=said):
        watch().train(configure(**changes))
    assert not configure().run.exists()


def test_a_refiner_too_large_for_its_base_is_refused(configure, watch, build_pairs):
    with pytest.raises(BadInput, match="at most 30% of the base's parameters"):
        watch().train(configure(refiner__preset="sdxl-half", refiner__shape=None, refiner__base="SD1.5"))
    assert not configure().run.exists()


@pytest.mark.parametrize("missing", ["folder", "shard"])
def test_a_dataset_that_is_not_whole_is_one_sentence(configure, watch, build_pairs, missing):
    folder = build_pairs()
    if missing == "folder":
        folder = folder.with_name("nothing")
    else:
        shard = next(folder.glob("shard-*"))
        shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(BadInput, match="dataset"):
        watch().train(configure(dataset=folder))
    assert not configure().run.exists()


def test_cublas_that_was_used_before_a_deterministic_run_is_one_sentence(tmp_path):
    """torch's own words, from a machine with a GPU; on a CPU it never says them."""
    folder = RunFolder(tmp_path)
    with pytest.raises(BadInput, match="deterministic: .* start ComfyUI with --deterministic"), folder.failures_told(
        lambda: (0, 12)
    ):
        raise RuntimeError(
            "this operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2. To enable "
            "deterministic behavior in this case, you must set an environment variable before running your PyTorch "
            "application: CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )
    assert folder.status()["state"] == "failed" and "--deterministic" in folder.status()["message"]
