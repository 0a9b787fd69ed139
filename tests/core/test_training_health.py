"""Loss scaling and numbers that are not finite: what reaches the weights, what ends a run, and what is told then."""

import itertools
import json
import math
import re

import pytest
import torch
from torch import nn
from torch.nn import Linear

from training.config.sections import HealthConfig
from training.errors import TrainingFailed
from training.precision import advice
from training.precision.advice import training_advice
from training.precision.device import Support
from training.precision.guard import FirstBadLayer
from training.precision.scaling import needs_scaler
from training.run.checkpoints.checkpoint import load_newest
from training.run.watch.health import StepHealth
from training.run.watch.nan_origin import FirstBadGradient, find_origin
from training.run.watch.scaler_health import ScalerHealth

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("compute", FLOATS)
@pytest.mark.parametrize("trainables", [c for n in (1, 2, 3) for c in itertools.combinations(FLOATS, n)])
def test_the_loss_is_scaled_for_fp16_over_float32_alone(compute, trainables):
    assert needs_scaler(compute, trainables) == (compute == torch.float16 and trainables == (torch.float32,))


@pytest.mark.parametrize("precision, scaled", [("fp32", False), ("bf16", False), ("fp16", True), ("pure_bf16", False)])
def test_the_scaler_of_a_run_is_on_in_fp16_alone(configure, watch, monkeypatch, precision, scaled):
    made, scaler = [], torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp, "GradScaler", lambda device, enabled: made.append(enabled) or scaler(device, enabled=enabled)
    )
    watch(stop_after=0).train(configure(precision=precision))
    assert made == [scaled]


# ---- the scaler -----------------------------------------------------------------------------------------------------


def test_skips_are_counted_in_a_row_and_in_all_and_scales_where_they_change():
    health = ScalerHealth(most_skips=3, floor=1.0)
    assert [health.record(*given) for given in [(1, True, 8), (2, False, 4), (3, False, 2), (4, True, 2)]] == [""] * 4
    assert (health.in_a_row, health.skipped) == (0, 2) and health.history == [[1, 8], [2, 4], [3, 2]]
    again = ScalerHealth(3, 1.0)
    again.restore(json.loads(json.dumps(health.state())))
    assert again.state() == health.state()
    assert again.record(5, False, 1.0) == "" and "below 1" in again.record(6, False, 0.5)
    again = ScalerHealth(3, 0.0)
    assert [again.record(step, False, 1.0) for step in range(3)] == ["", "", "3 steps in a row were skipped"]


def parts(scale=65536.0, **settings):
    """(StepHealth, its scaler, its optimizer, its parameter) of a run with one parameter of ones."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return StepHealth(HealthConfig(**settings), optimizer, scaler), scaler, optimizer, parameter


def attempt(health, scaler, optimizer, parameter, step, factor=1.0):
    """One step on the loss `factor` * sum(parameter)."""
    optimizer.zero_grad()
    loss = factor * parameter.sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = float(nn.utils.clip_grad_norm_([parameter], 1.0))
    return health.update(step, 1.0, norm, lambda scale: f"the culprit at {scale:g}", lambda: "kept: step-00000007")


def test_two_hundred_nan_gradients_end_the_run_in_twenty_and_move_nothing():
    given = parts(scale_floor=0.0)
    for step in range(1, 20):
        assert attempt(*given, step, float("nan")) is False
    with pytest.raises(TrainingFailed) as caught:
        for step in range(20, 201):
            attempt(*given, step, float("nan"))
    said = str(caught.value)
    assert said.startswith("Step 20: expected a finite loss and gradient, got loss 1, gradient norm nan")
    assert "20 steps in a row were skipped; the last scales were 1, 0.5, 0.25, 0.125, 0.0625" in said
    assert "First not finite: the culprit at 0.125." in said and said.endswith("kept: step-00000007.")
    assert torch.equal(given[3], torch.ones(4))


def test_a_scale_below_the_floor_ends_the_run_before_it_can_be_zero():
    given = parts(skips=1000)
    with pytest.raises(TrainingFailed, match=r"Step 17: .*the loss scale fell to 0.5, below 1; the last scales were "):
        for step in range(1, 201):
            attempt(*given, step, float("inf"))
    assert torch.equal(given[3], torch.ones(4))


def test_a_scale_of_zero_writes_nan_into_the_weights_unless_the_gradients_are_looked_at():
    """torch's own loop at scale 0: the step of a good batch goes through. Ours is left out."""
    _, scaler, optimizer, parameter = parts(scale=0.0)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert parameter.isnan().all()

    given = parts(scale=0.0, scale_floor=0.0)
    assert attempt(*given, 1) is False
    assert torch.equal(given[3], torch.ones(4))


@pytest.mark.parametrize("loss", [float("inf"), float("nan")])
def test_one_loss_that_is_not_finite_is_a_skip_like_any_other(loss):
    """In float16 a batch can overflow in the forward pass; the next one need not."""
    health, scaler, optimizer, parameter = parts()
    for step in range(1, 6):
        optimizer.zero_grad()
        bad = step == 3
        scaler.scale((loss if bad else 1.0) * parameter.sum()).backward()
        scaler.unscale_(optimizer)
        norm = float(nn.utils.clip_grad_norm_([parameter], 1.0))
        before = parameter.detach().clone()
        given = (loss if bad else 1.0, norm, lambda scale: "", lambda: "")
        assert health.update(step, *given) is not bad and torch.equal(parameter, before) is bad
    assert health.state()["skipped"] == 1 and scaler.get_scale() == 32768


def test_twenty_such_losses_in_a_row_end_the_run():
    health, *_ = parts(scale_floor=0.0)
    with pytest.raises(TrainingFailed, match="Step 20: .*got loss inf.*20 steps in a row were skipped"):
        for step in range(1, 30):
            attempt_with_loss(health, step)


def attempt_with_loss(health, step):
    health.optimizer.zero_grad()
    health.scaler.scale(float("inf") * health.optimizer.param_groups[0]["params"][0].sum()).backward()
    health.scaler.unscale_(health.optimizer)
    assert health.update(step, float("inf"), float("inf"), lambda scale: "", lambda: "") is False


def test_a_good_step_is_taken_and_an_overflow_skipped():
    given = parts()
    assert attempt(*given, 1) is True and not torch.equal(given[3], torch.ones(4))
    before = given[3].detach().clone()
    assert attempt(*given, 2, float("inf")) is False and torch.equal(given[3], before)
    assert given[0].journalled() == {"loss_scale": 32768.0}
    assert attempt(*given, 3) is True and given[0].scale_health.in_a_row == 0


def test_the_sentence_is_told_also_where_the_origin_cannot_be_found():
    health, scaler, optimizer, parameter = parts(skips=1)
    scaler.scale(float("inf") * parameter.sum()).backward()
    scaler.unscale_(optimizer)

    def fails(scale):
        raise RuntimeError("out of memory")

    with pytest.raises(TrainingFailed, match=r"gradient norm inf.*kept"):
        health.update(1, float("nan"), float("inf"), fails, lambda: "kept: nothing")


# ---- where it came from ---------------------------------------------------------------------------------------------


class Backward(torch.autograd.Function):
    """The identity; its gradient is multiplied."""

    @staticmethod
    def forward(context, x, factor):
        context.factor = factor
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * context.factor, None


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = Linear(3, 3), Linear(3, 3), Linear(3, 1)
        self.factor = 1.0

    def forward(self, x):
        return self.last(Backward.apply(self.middle(self.first(x)), self.factor))


def test_the_origin_is_the_first_layer_with_a_bad_output_and_its_gradient_norm():
    net = Layered()
    assert find_origin(net, lambda: net(torch.ones(2, 3)).sum().backward(), FirstBadLayer) == ""
    with torch.no_grad():
        net.middle.weight[0, 0] = float("nan")
    said = find_origin(net, lambda: net(torch.ones(2, 3)).sum().backward(), FirstBadLayer)
    assert "layer middle (Linear, fp32)" in said and "middle.weight holds NaN" in said
    norm = torch.cat([p.grad.flatten() for p in net.middle.parameters()]).norm()
    assert float(said.rpartition("gradient norm of that layer ")[2]) == pytest.approx(float(norm), rel=1e-3)
    assert not net.first._forward_hooks and not net.first._forward_pre_hooks


def test_the_origin_of_a_bad_gradient_is_where_the_way_back_meets_it():
    net = Layered()
    net.factor = float("inf")
    said = find_origin(net, lambda: net(torch.ones(2, 3)).sum().backward(), FirstBadLayer)
    assert said.startswith("the gradient at the output of layer middle (Linear); it was finite before that, at the ")
    assert "output of layer last, with norm 1.41" in said
    said = find_origin(net, lambda: (net(torch.ones(2, 3)).sum() * float("nan")).backward(), FirstBadLayer)
    assert said.startswith("the gradient of the loss itself")
    assert all(not layer._forward_hooks for layer in net.children())


def test_a_bad_gradient_of_a_parameter_alone_is_named_too():
    net = Layered()
    net.last.weight.register_hook(lambda gradient: gradient * float("inf"))
    said = find_origin(net, lambda: net(torch.ones(2, 3)).sum().backward(), FirstBadLayer)
    assert said.startswith("the gradient of the parameter last.weight, gradient norm ")


def test_a_look_leaves_the_gradients_as_they_are():
    net = Layered()
    net(torch.ones(2, 3)).sum().backward()
    plain = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with FirstBadGradient(net) as look:
        net(torch.ones(2, 3)).sum().backward()
    assert look.found is None and all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), plain, strict=True))


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "pure_bf16"])
def test_a_layer_that_gives_nan_ends_the_run_by_name_with_the_weights_of_before(
    configure, watch, monkeypatch, precision
):
    from training.objectives.residual import objective

    built, build = [], objective.build_unet
    monkeypatch.setattr(objective, "build_unet", lambda shape: built.append(build(shape)) or built[-1])

    class Poisoner(watch):
        def on_step(self, step, *given):
            super().on_step(step, *given)
            if step == 5:
                with torch.no_grad():
                    built[0].conv_in.bias[0] = float("nan")
                self.before = {name: t.clone() for name, t in built[0].state_dict().items()}

    watcher = Poisoner()
    config = configure(precision=precision, data__crop=8, validation__pictures=0)
    with pytest.raises(TrainingFailed) as caught:
        watcher.train(config)
    said = str(caught.value)
    assert said.startswith("Step 6: expected a finite loss") and "layer conv_in (Conv2d" in said
    assert "conv_in.bias holds NaN" in said and said.endswith("kept: step-00000004.")
    state = json.loads((config.run / "status.json").read_text())
    assert state["state"] == "failed" and state["message"] == said
    assert all(
        torch.equal(t.nan_to_num(9), watcher.before[name].nan_to_num(9)) for name, t in built[0].state_dict().items()
    )
    kept = load_newest(config.run / ".checkpoints")[0]
    assert kept.step == 4 and all(t.isfinite().all() for t in kept.weights.values())


def test_the_scale_is_in_the_journal_and_the_report(configure, watch):
    result = watch().train(configure(precision="fp16", data__crop=8, validation__pictures=0, epochs=1))
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss_scale"] for line in lines] == [65536.0] * 4
    assert result.report["watched"]["loss_scale"] == {"skipped": 0, "in_a_row": 0, "history": [[1, 65536.0]]}


# ---- advice ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device, bf16, fp16, said",
    [
        ("cuda", Support(True, True), Support(True, True), "advice: bf16: .* needs no loss scaling"),
        ("cuda", Support(True, False, "it emulates bf16"), Support(True, True), "advice: fp16: it emulates bf16, whi"),
        ("cuda", Support(True, False, "it emulates bf16"), Support(True, False, "x"), "advice: fp32: it emulates bf16"),
        ("cpu", Support(True, False, "this CPU emulates bf16"), Support(True, True), "advice: fp32: this CPU emulates"),
    ],
)
def test_advice_comes_with_its_reason(monkeypatch, device, bf16, fp16, said):
    monkeypatch.setattr(advice, "support", lambda _, dtype: bf16 if dtype == torch.bfloat16 else fp16)
    text = training_advice(torch.device(device), 2**20)
    assert re.match(said, text) and "take 16 MiB, and 8 MiB in pure_bf16" in text


def test_advice_for_adapters_counts_what_they_train():
    text = training_advice(torch.device("cpu"), 64 * 2**20, 2**20)  # 4 or 2 bytes of a frozen parameter
    assert "of its adapters, take 272 MiB, and 136 MiB in pure_bf16" in text


def test_a_run_says_its_advice(whole_run):
    result, _ = whole_run
    assert sum(choice.startswith("advice: ") for choice in result.report["choices"]) == 1
    assert math.isfinite(result.report["training"]["last_loss"])
