"""Memory: gradient checkpointing changes no gradient, and a leak is found with its slope."""

import random

import pytest
import torch
from torch.nn import Linear

from training.data.batches import BatchSource
from training.data.shards import RefinerDataset
from training.errors import TrainingFailed
from training.objectives.residual.model import Refiner
from training.objectives.residual.objective import batch_loss
from training.objectives.residual.unet import build_unet
from training.run.plan import make_plan
from training.run.watch.leak_watch import LeakWatch, memory_of, slope

CPU = torch.device("cpu")
MiB = 2**20
ATTENTION = {
    "block_channels": [32, 32], "layers_per_block": 1, "transformer_depth": [1, 0], "middle_depth": 1, "heads": [1, 1],
    "context_dim": 8,
}


# ---- gradient checkpointing -----------------------------------------------------------------------------------------


def gradients(config, dataset, checkpointing):
    """Every parameter's gradient of the first batch, and the network."""
    whole = make_plan(config, RefinerDataset.open(dataset), 4)
    plan = whole.objective
    torch.manual_seed(0)
    net = build_unet(plan.unet)
    torch.nn.init.normal_(net.conv_out.weight, std=0.1)  # it starts at zero, which would stop all other gradients
    if checkpointing:
        net.enable_gradient_checkpointing()
    batch = BatchSource(dataset, batch_size=2, seed=0)[0]
    batch_loss(Refiner(net.train(), plan.s, plan.c_v, whole.compute.autocast), plan, batch, 0)[0].backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpointed_gradients_are_the_plain_ones(configure, dataset, monkeypatch, precision):
    from torch.utils import checkpoint

    called, run = [], checkpoint.checkpoint
    monkeypatch.setattr(
        checkpoint, "checkpoint", lambda *given, **options: called.append(options) or run(*given, **options)
    )
    config = configure(refiner__shape=ATTENTION, precision=precision)
    plain = gradients(config, dataset, False)
    assert called == []
    saved = gradients(config, dataset, True)
    assert called and all(options["use_reentrant"] is False for options in called)
    assert plain.keys() == saved.keys() and all(gradient is not None for gradient in plain.values())
    for name, gradient in plain.items():
        assert float((saved[name] - gradient).norm()) <= 1e-6 * float(gradient.norm()), name


@pytest.mark.parametrize("precision", ["fp32", "pure_bf16"])
def test_after_two_steps_every_trainable_has_moved_by_a_gradient_of_its_own(
    configure, watch, monkeypatch, build_pairs, precision
):
    """With text, gradient checkpointing and the zero that the last layer starts from."""
    from training.objectives.residual import objective
    from training.run import train as run

    built, norms, build, take = [], {}, objective.build_unet, run.StepHealth.update

    def keep(shape):  # asked twice: for the network, on the meta device, and for its weights
        net = build(shape)
        built.append((net, {name: p.detach().clone() for name, p in net.named_parameters()}))
        return net

    def look(self, *given):
        for name, parameter in built[0][0].named_parameters():
            norms[name] = max(norms.get(name, 0.0), float(parameter.grad.float().norm()))
        return take(self, *given)

    monkeypatch.setattr(objective, "build_unet", keep)
    monkeypatch.setattr(run.StepHealth, "update", look)
    text = {"tokens": 3, "dim": 8, "pooled": 0, "fingerprint": "c0ffee"}
    watcher = watch(stop_after=2)
    config = configure(
        dataset=build_pairs(text=text), refiner__shape=ATTENTION, gradient_checkpointing=True, precision=precision,
        optimizer__learning_rate=1e-2, optimizer__warmup_steps=0, data__caption_dropout=0, validation__pictures=0,
    )
    assert watcher.train(config).status == "stopped" and watcher.steps == [1, 2]
    net, start = built[0][0], built[1][1]
    assert len(start) == len(norms) > 20
    # a constant added to all keys of an attention changes no softmax, so diffusers' keys have no bias: none is excused
    assert [name for name, norm in norms.items() if not norm > 0] == []
    assert [name for name, p in net.named_parameters() if torch.equal(p, start[name].to(p.dtype))] == []


def test_gradient_checkpointing_changes_no_byte_of_a_run_and_may_change_in_the_middle(configure, watch, whole_run):
    assert watch(stop_after=5).train(configure(validation__pictures=0)).status == "stopped"
    result = watch().train(configure(validation__pictures=0, gradient_checkpointing=True))
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()
    assert any("non-reentrant" in choice for choice in result.report["choices"])


# ---- the leak watch -------------------------------------------------------------------------------------------------


def watch_series(values, **options):
    """Feed a memory curve, one value a step; returns the step at which the watch objected, or None."""
    now = []
    guard = LeakWatch(lambda: {"allocated": now[-1], "reserved": 512 * MiB}, **options)
    for step, value in enumerate(values, 1):
        now.append(int(value))
        try:
            guard.look(step)
        except TrainingFailed as error:
            return step, str(error)
    return None


def test_the_slope_is_that_of_least_squares():
    steps = [1, 2, 4, 7]
    assert slope(steps, [5 + 3 * s for s in steps]) == pytest.approx(3)
    assert slope(steps, [4, 4, 4, 4]) == 0


def noise(scale, count, seed=0):
    dice = random.Random(seed)
    return [dice.gauss(0, scale) for _ in range(count)]


def test_a_planted_leak_is_found_with_its_slope_and_step():
    leaking = [100 * MiB + step * 0.5 * MiB + jitter for step, jitter in enumerate(noise(5 * MiB, 3000))]
    step, said = watch_series(leaking)
    assert 512 < step < 800  # 256 MiB at half a MiB a step, after the warm-up
    assert said.startswith(f"Step {step}: expected steady memory, but allocated memory has grown by 0.")
    found = float(said.partition("grown by ")[2].partition(" MiB")[0])
    assert found == pytest.approx(0.5, rel=0.1) and "since step 60" in said


def test_a_leak_that_starts_late_and_a_slow_one_are_found_too():
    late = [100 * MiB] * 2000 + [100 * MiB + step * 0.5 * MiB for step in range(4000)]
    assert 2000 < watch_series(late)[0] < 4500
    slow = (100 * MiB + step * 0.02 * MiB for step in range(40_000))
    assert 12_800 < watch_series(slow)[0] < 20_000


@pytest.mark.parametrize(
    "memory",
    [
        [300 * MiB + jitter for jitter in noise(40 * MiB, 3000)],
        [100 * MiB] * 500 + [900 * MiB] * 2500,  # a validation fills a cache once
        [100 * MiB + min(step, 700) * MiB for step in range(60)] + [160 * MiB] * 2000,
        [(100 + 400 * (step % 200 > 100)) * MiB for step in range(3000)],  # up and down again
        [100 * MiB + 300 * MiB * (step // 800) for step in range(1700)],  # two steps up
        [100 * MiB + step * 0.01 * MiB for step in range(3000)],  # 30 MiB in 3,000 steps
    ],
    ids=["noise", "one step", "warm-up", "waves", "two steps", "little"],
)
def test_memory_that_does_not_grow_all_the_time_is_let_be(memory):
    assert watch_series(memory) is None


def test_a_long_run_keeps_few_samples():
    guard = LeakWatch(lambda: {"resident": 5})
    for step in range(1, 50_001):
        guard.look(step)
    assert len(guard.steps) < LeakWatch.MOST and guard.steps[0] == 60 and guard.steps[-1] > 49_000
    assert guard.summary() == {"resident": {"first": 5, "last": 5, "slope_bytes_per_step": 0.0}}
    silent = LeakWatch(dict)
    silent.look(1)
    assert silent.summary() == {}


def a_thousand_steps(leak):
    """A small training loop under the real watch; `leak` gets each step's activations."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(Linear(64, 64), torch.nn.ReLU(), Linear(64, 64))
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    guard = LeakWatch(lambda: memory_of(CPU), tolerance=32 * MiB)
    for step in range(1, 1001):
        x = torch.randn(512, 64)
        output = net(x)
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        leak(output)
        guard.look(step)
    return guard


@pytest.mark.skipif(not memory_of(CPU), reason="this system does not tell the resident memory")
def test_the_memory_of_this_process_is_watched_for_real():
    guard = a_thousand_steps(lambda output: None)
    assert len(guard.steps) == 95 and guard.summary()["resident"]["first"] > 50 * MiB
    kept = []
    with pytest.raises(TrainingFailed, match=r"^Step \d+: .* resident memory has grown by 0\.\d+ MiB a step"):
        a_thousand_steps(kept.append)  # each keeps its graph: the activations of the step


@pytest.mark.skipif(not memory_of(CPU), reason="this system does not tell the resident memory")
def test_pages_of_mapped_shards_are_no_leak(tmp_path):
    """A run sees its dataset through mapped files, whose pages count as resident until all of it has been seen."""
    cells, steps = MiB // 4, 320
    path = tmp_path / "shard"
    path.write_bytes(bytes(MiB) * steps)
    shard = torch.from_file(str(path), shared=True, size=cells * steps)
    guard = LeakWatch(lambda: memory_of(CPU), every=5, warm_up=10, tolerance=64 * MiB)
    for step in range(1, steps + 1):
        assert float(shard[(step - 1) * cells : step * cells].sum()) == 0
        guard.look(step)
    assert len(guard.steps) == 62


@pytest.mark.full
@pytest.mark.skipif(not memory_of(CPU), reason="this system does not tell the resident memory")
def test_a_run_of_a_thousand_steps_is_flat(configure, watch):
    result = watch().train(configure(data__crop=8, validation__pictures=0, epochs=250))
    assert result.status == "done" and result.report["training"]["steps"] == 1000
    memory = result.report["watched"]["memory"]["resident"]
    assert abs(memory["slope_bytes_per_step"]) * 1000 < 32 * MiB


def test_a_run_that_leaks_is_ended_and_the_watch_can_be_turned_off(configure, watch, monkeypatch, tmp_path):
    from training.run import train as run

    grows = iter(range(10**6))
    leaking = lambda: {"allocated": next(grows) * 100 * MiB}  # noqa: E731
    monkeypatch.setattr(run, "memory_of", lambda device: {"allocated": 0})
    monkeypatch.setattr(
        run, "LeakWatch", lambda measure: LeakWatch(lambda: measure() and leaking(), every=1, warm_up=2)
    )
    changes = {"data__crop": 8, "validation__pictures": 0, "epochs": 6}
    with pytest.raises(TrainingFailed, match="Step 18: .*allocated memory has grown by 100 MiB a step since step 3"):
        watch().train(configure(**changes))
    off = configure(run=tmp_path / "off", health__leak_watch=False, **changes)
    assert watch().train(off).report["watched"]["memory"] == {}
