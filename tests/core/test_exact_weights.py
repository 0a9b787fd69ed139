"""pure_bf16: what optimizer, average and file have is one and the same weight, however little it moves."""

import json

import pytest
import torch
from torch.nn import Linear

from tests.core.starts import write_start
from training.config.train_config import TrainConfig
from training.objectives.residual.file import load_refiner
from training.run.checkpoints.checkpoint import list_steps, load_newest
from training.run.optim.ema import EMA
from training.run.optim.rounding import join_float32
from training.storage.checksums import write_checksums

BRIEF = {"validation__pictures": 0, "epochs": 1, "precision": "pure_bf16"}
SMALL_STEPS = {**BRIEF, "optimizer__learning_rate": 1e-6, "optimizer__warmup_steps": 0}


def kept_by_the_optimizer(folder):
    """Name -> float32 weight, from the newest checkpoint."""
    found = load_newest(folder / ".checkpoints")[0]
    exact = {}
    for name, weight in found.weights.items():
        exact[name] = found.optimizer.get(f"{name}/master")
        if exact[name] is None:
            exact[name] = join_float32(weight, found.optimizer[f"{name}/compensation"])
    return exact


@pytest.mark.parametrize("rounding", ["kahan", "master"])
def test_the_file_has_what_the_optimizer_has(configure, watch, rounding, tmp_path):
    """Steps of 1e-6 are smaller than the gap of two bfloat16 numbers: the rounded weights hardly move."""
    start = write_start(tmp_path / "start" / "refiner.safetensors")
    config = configure(
        refiner={"start_from": str(start)}, ema_decay=0.0, optimizer__rounding=rounding, **SMALL_STEPS
    )
    trained, before = load_refiner(watch().train(config).refiner)[0], load_refiner(start)[0]
    exact = kept_by_the_optimizer(config.run)
    assert all(torch.equal(trained[name], exact[name]) for name in exact)
    moved = [(trained[name] - before[name]).abs().max() for name in exact]
    assert 0 < float(max(moved)) < 1e-5  # in four steps of 1e-6, and not by the 4e-3 that rounding the start would cost


@pytest.mark.parametrize("rounding", ["stochastic", "kahan", "master"])
def test_a_start_is_not_rounded_before_the_average_is_made(configure, watch, rounding, tmp_path):
    start = write_start(tmp_path / "start" / "refiner.safetensors")
    first = watch(stop_after=0)
    config = configure(refiner={"start_from": str(start)}, optimizer__rounding=rounding, **SMALL_STEPS)
    assert first.train(config).status == "stopped"
    before, found = load_refiner(start)[0], load_newest(config.run / ".checkpoints")[0]
    assert all(torch.equal(found.ema[name], before[name]) for name in before)
    if rounding != "stochastic":
        exact = kept_by_the_optimizer(config.run)
        assert all(torch.equal(exact[name], before[name]) for name in before)


def test_the_average_follows_the_exact_weight():
    net = Linear(1, 1, bias=False)
    torch.nn.init.constant_(net.weight, 1.0)
    ema = EMA(net, 0.5)
    net.bfloat16()
    ema.update(100, lambda live: torch.full_like(live, 1.0009765625, dtype=torch.float32))  # 2^-10: no bfloat16 number
    assert float(ema.state_dict()["weight"]) == 1 + 2**-11


def test_a_stopped_run_with_kahan_goes_on_to_the_same_bytes(configure, watch, tmp_path):
    whole = watch().train(configure(run=tmp_path / "whole", **BRIEF))
    assert watch(stop_after=2).train(configure(**BRIEF)).status == "stopped"
    assert watch().train(configure(**BRIEF)).refiner.read_bytes() == whole.refiner.read_bytes()


# ---- what "auto" means ----------------------------------------------------------------------------------------------


def low(**optimizer) -> TrainConfig:
    return TrainConfig.build({"dataset": "d", "run": "r", "precision": "pure_bf16", "optimizer": optimizer})


def test_the_default_is_the_rounding_that_is_true_unless_memory_comes_first():
    assert low().optimizer.chosen_rounding == "kahan"
    assert low(moments="bf16").optimizer.chosen_rounding == "stochastic"
    assert low(moments="bf16", rounding="master").optimizer.chosen_rounding == "master"


def test_the_reason_is_said(configure, watch, tmp_path):
    said = {}
    for number, moments in enumerate(("fp32", "bf16")):
        watcher = watch(stop_after=0)
        watcher.train(configure(run=tmp_path / f"run-{number}", optimizer__moments=moments, **BRIEF))
        (said[moments],) = (text for text in watcher.messages if text.startswith("pure_bf16:"))
    assert "(kahan, moments fp32: what rounding drops is kept" in said["fp32"]
    assert "(stochastic, moments bf16: the least memory, for a fit up to 3 % above" in said["bf16"]


def begun_before(config: TrainConfig, rounding: str | None) -> None:
    """Make a run's config.json what earlier versions wrote: no rounding where it was the default."""
    path = config.run / "config.json"
    kept = json.loads(path.read_text())
    kept["identity"]["optimizer"].pop("rounding", None)
    if rounding:
        kept["identity"]["optimizer"]["rounding"] = rounding
    path.write_text(json.dumps(kept))


def test_a_run_begun_before_that_named_no_rounding_goes_on_as_it_was(configure, watch, tmp_path):
    whole = watch().train(configure(run=tmp_path / "whole", optimizer__rounding="stochastic", **BRIEF))
    assert watch(stop_after=2).train(configure(optimizer__rounding="stochastic", **BRIEF)).status == "stopped"
    begun_before(configure(**BRIEF), None)
    result = watch().train(configure(**BRIEF))
    assert result.refiner.read_bytes() == whole.refiner.read_bytes()
    assert watch().train(configure(**BRIEF)).status == "reused"


@pytest.mark.parametrize("rounding", ["kahan", "master"])
def test_a_run_begun_before_goes_on_with_its_average_of_rounded_weights(configure, watch, rounding):
    """What earlier versions wrote of the average was nothing at all."""
    config = configure(
        optimizer__rounding=rounding, ema_decay=0.0, **{**BRIEF, "optimizer__learning_rate": 1e-6, "epochs": 2}
    )
    first = watch(stop_after=2).train(config)
    (path,) = list_steps(first.folder / ".checkpoints")
    state = json.loads((path / "state.json").read_text())
    assert state.pop("average") == "exact weights"
    (path / "state.json").write_text(json.dumps(state))
    (path / "SHA256SUMS").unlink()
    write_checksums(path)
    watcher = watch()
    trained, found = load_refiner(watcher.train(config).refiner)[0], load_newest(config.run / ".checkpoints")[0]
    assert all(torch.equal(trained[name], weight.float()) for name, weight in found.weights.items())
    assert found.state["average"] == "rounded weights"
    assert sum("its averaged weights go on" in text for text in watcher.messages) == 1
    assert watch().train(config).status == "reused"


def test_an_earlier_workflow_says_stochastic_in_every_precision():
    for precision in ("fp32", "bf16", "fp16"):
        config = TrainConfig.build(
            {"dataset": "d", "run": "r", "precision": precision, "optimizer": {"rounding": "stochastic"}}
        )
        assert config.identity() == TrainConfig.build({"dataset": "d", "run": "r", "precision": precision}).identity()
