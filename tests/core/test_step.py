"""One optimizer step in one process: what happens in which order, what leaves the device, and what it is counted as."""

import json
from contextlib import closing

import pytest
import torch
from torch import nn
from torch.nn import Conv2d, Linear
from torch.utils._python_dispatch import TorchDispatchMode

from training.config.network import UNetConfig
from training.config.train_config import HealthConfig, OptimizerConfig
from training.data.batches import BatchSource
from training.data.loading import batches
from training.distributed.world import World
from training.errors import BadInput
from training.objectives.base import Compute
from training.objectives.choose import choose_objective, plan_objective
from training.objectives.residual import flow
from training.objectives.residual.model import Refiner
from training.objectives.residual.unet import build_unet
from training.objectives.trainables import build_on
from training.run.feed import BatchFeed
from training.run.optim.build import build_optimizer
from training.run.step import TrainStep
from training.run.watch.health import StepHealth
from training.run.watch.speed import Speed, count_flops, peak_flops

CPU = torch.device("cpu")


@pytest.fixture
def stepping(configure, dataset):
    """stepping(accumulation) -> (TrainStep, its batches) of the tiny network in float32."""

    def make(accumulation=2):
        config, source = configure(), BatchSource(dataset, batch_size=2, seed=0)
        plan = plan_objective(config, source.data, [])
        objective = choose_objective(config, plan, source.data, Compute(CPU, None, torch.float32))
        torch.manual_seed(0)
        net = build_on(CPU, objective.network, objective.first_weights)
        optimizer = build_optimizer(OptimizerConfig(), dict(net.named_parameters()), seed=0)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        health = StepHealth(HealthConfig(), optimizer, scaler, net)
        step = TrainStep(objective, net, optimizer, scaler, health, accumulation=accumulation, clip_norm=1.0)
        return step, BatchFeed(source[k] for k in range(10**6))

    return make


def test_the_next_batch_is_asked_for_after_backward_and_before_the_weights_change(stepping):
    step, feed = stepping()
    parameter, told = step.net.conv_out.bias, []

    def look(name):
        told.append((name, bool(parameter.grad.any()), bool(parameter.any())))

    for number in (1, 2):
        step(number, feed, 1e-2, while_computing=lambda: look("ahead"), before_update=lambda: look("update"))
        if number == 1:
            assert told == [("ahead", True, False), ("update", True, False)]  # it starts at zero
            assert parameter.any() and parameter.grad is None


class Fetched(TorchDispatchMode):
    """Counts the numbers that are asked for one by one: `float(tensor)`, `if tensor:`."""

    count = 0

    def __torch_dispatch__(self, operation, types, given=(), options=None):
        self.count += operation is torch.ops.aten._local_scalar_dense.default
        return operation(*given, **(options or {}))


def test_no_number_of_a_micro_batch_is_fetched_by_itself(stepping):
    step, feed = stepping(accumulation=3)
    step(1, feed, 1e-2)
    batches = [next(feed) for _ in range(3)]
    with Fetched() as mode:
        float(torch.ones(()))
        assert mode.count == 1  # else this would see nothing
        step(2, iter(batches), 1e-2)
    assert mode.count == 1


def test_what_a_loader_fails_with_ahead_is_raised_in_its_turn():
    def batches():
        yield {"index": 0}
        yield {"index": 1}
        raise BadInput("shard 3 is damaged")

    feed = BatchFeed(batches())
    assert next(feed)["index"] == 0
    feed.fetch_ahead()
    assert next(feed)["index"] == 1 and feed.failure is None
    feed.fetch_ahead()
    assert isinstance(feed.failure, BadInput)
    with pytest.raises(BadInput, match="shard 3"):
        next(feed)
    with pytest.raises(BadInput, match="shard 3"):
        World().agree(False, feed.failure)
    assert World().agree(True, feed.failure)  # a stop is heard first


# ---- the network ----------------------------------------------------------------------------------------------------


def test_a_network_is_built_without_memory_and_then_filled(configure, dataset):
    config, source = configure(), BatchSource(dataset, batch_size=2, seed=0)
    compute = Compute(CPU, None, torch.float32)
    objective = choose_objective(config, plan_objective(config, source.data, []), source.data, compute)
    built = []
    torch.manual_seed(3)
    expected = objective.first_weights()
    torch.manual_seed(3)
    net = build_on(CPU, lambda: built.append(objective.network()) or built[-1], objective.first_weights)
    assert net is built[0] and {p.device for p in net.parameters()} == {CPU}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in net.state_dict().items())
    with pytest.raises(ValueError, match="conv_in.bias"):
        build_on(CPU, objective.network, lambda: {k: v for k, v in expected.items() if k != "conv_in.bias"})


class Wrapped(nn.Module):
    """Hides what is inside, as DDP does."""

    def __init__(self, net):
        super().__init__()
        self.module = net

    def forward(self, *given, **options):
        return self.module(*given, **options)


def test_a_wrapped_network_gets_its_input_in_the_dtype_of_the_plan():
    shape = UNetConfig(
        latent_channels=3, block_channels=[32], layers_per_block=1, transformer_depth=[0], middle_depth=0, heads=[1],
        context_dim=8,
    )
    net = build_unet(shape).bfloat16()
    nn.init.normal_(net.conv_out.weight, std=0.1)
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([1.0, 0.5])
    given = x, x, t, {"context": torch.zeros(2, 1, 8)}
    plain = Refiner(net, 0.1, 0.1, dtype=torch.bfloat16).output(*given)
    wrapped = Refiner(Wrapped(net), 0.1, 0.1, dtype=torch.bfloat16).output(*given)
    assert plain.dtype == torch.bfloat16 and torch.equal(plain, wrapped)


def test_the_loss_is_in_float32_at_least():
    output, v = torch.full((1, 4), 1.0, dtype=torch.float64), torch.full((1, 4), 1.0 + 1e-9, dtype=torch.float64)
    assert float(flow.loss_per_sample(output, v, 1.0)) == pytest.approx(1e-18, rel=1e-6)
    assert flow.loss_per_sample(output.bfloat16(), v.bfloat16(), 1.0).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_optimizer_steps_over_an_empty_part_of_a_parameter(dtype):
    """A rank's part of a parameter that is split may hold nothing."""
    parts = {"empty": nn.Parameter(torch.zeros(0, 3, dtype=dtype)), "some": nn.Parameter(torch.ones(2, 3, dtype=dtype))}
    optimizer = build_optimizer(OptimizerConfig(learning_rate=0.5), parts, seed=0)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    for part in parts.values():
        part.grad = torch.ones_like(part)
    nn.utils.clip_grad_norm_(parts.values(), 1.0)
    optimizer.step()
    assert parts["empty"].shape == (0, 3) and float(parts["some"].detach().max()) < 0.6


# ---- speed ----------------------------------------------------------------------------------------------------------


def test_operations_are_counted_forward_and_backward():
    layer, x = Linear(8, 4, bias=False), torch.randn(5, 8)
    given, flops = count_flops(lambda: layer(x).sum().backward())
    assert given is None and flops == 2 * 5 * 8 * 4 * 2  # x asks for no gradient
    conv = Conv2d(3, 6, 3, padding=1)
    _, flops = count_flops(lambda: conv(torch.randn(2, 3, 7, 7)))
    assert flops == 2 * 2 * 7 * 7 * 6 * 3 * 9


def test_the_share_of_the_peak_is_said_where_the_peak_is_known():
    assert peak_flops(CPU, torch.float32) is None
    speed = Speed(1e12)
    for seconds in (60.0, 2.0, 4.0):  # the first has the set-up in it
        speed.add(seconds, 1.0, 6e11)
    assert speed.last["mfu"] == pytest.approx(0.15) and speed.last["data_seconds"] == 1.0
    assert speed.summary() == pytest.approx(
        {"step_seconds": 3.0, "data_seconds": 1.0, "flops_per_second": 2e11, "mfu": 0.2}
    )
    unknown = Speed(None)
    unknown.add(1.0, 0.5, 6e11)
    assert "mfu" not in unknown.last and unknown.summary() == {}


def test_a_run_tells_its_speed_apart_from_its_journal(whole_run):
    result, _ = whole_run
    lines = [json.loads(line) for line in (result.folder / "speed.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(line["flops_per_second"] > 0 and line["step_seconds"] >= line["data_seconds"] >= 0 for line in lines)
    told = result.report["watched"]["speed"]
    assert told.keys() == {"step_seconds", "data_seconds", "flops_per_second"}


@pytest.mark.parametrize("workers", [0, 1])
def test_noise_and_times_are_made_where_batches_are_read(configure, dataset, workers):
    """They travel with the batch, also from another process, and are those that the loss would draw by itself."""
    config = configure(seed=5)
    plain, drawing = BatchSource(dataset, batch_size=2, seed=5), BatchSource(dataset, batch_size=2, seed=5)
    plan = plan_objective(config, plain.data, [])
    objective = choose_objective(config, plan, plain.data, Compute(CPU, None, torch.float32))
    net = build_on(CPU, objective.network, objective.first_weights)
    nn.init.normal_(net.conv_out.weight, std=0.1)
    drawing.draw = objective.draw()
    alone, brought = objective.histogram(), objective.histogram()
    with closing(batches(drawing, 7, workers, CPU)) as read:
        batch = next(read)
    assert batch["e"].shape == batch["z"].shape and batch["t"].shape == (2,)
    assert objective.loss(net, batch, brought)[1] == objective.loss(net, plain[7], alone)[1]
    assert brought.as_json() == alone.as_json() and sum(brought.as_json()["on_sigmas"].values()) > 0
