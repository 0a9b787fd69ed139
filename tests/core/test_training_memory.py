"""Model and Training Memory of the core: traces against real steps, optimizers against real ones, properties."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import optimizer_steps
from training.config.network import UNetConfig
from training.errors import BadInput
from training.memory.attention import BACKENDS, AttentionCall
from training.memory.machine import Machine, overhead, planned_machine
from training.memory.meter import StorageMeter
from training.memory.models import PRESETS
from training.memory.network_estimate import estimate_network, traced_network_shape
from training.memory.optimizers import EMA, GRADIENTS, LAYOUTS, OPTIMIZERS, PARAMETERS, Sizes, in_layout
from training.memory.phases import judge
from training.memory.trace import WEIGHTS, Trace
from training.memory.training_estimate import STEP, TrainingEstimate, TrainingQuestion, estimate_training
from training.memory.training_trace import (
    NETWORKS,
    Network,
    StepTrace,
    TracedTraining,
    attention_of,
    prepare,
    training_step,
)
from training.memory.vae_attention import VAE_ATTENTION, vae_attention_bytes
from training.objectives.trainables import trainables

SHAPE = UNetConfig(
    latent_channels=4,
    block_channels=(32, 64),
    layers_per_block=1,
    transformer_depth=(1, 1),
    heads=(2, 4),
    context_dim=24,
)
SMALL = Network("small", SHAPE, 8, True)
CPU = Machine(2**40, 2**40, False, "")


# ------------------------------------------------------------------------------------------------------- against real


def real_batch(batch, height, width):
    made = {name: torch.randn(batch, 4, height, width) for name in "zb"}
    return {**made, "t": torch.rand(batch), "context": torch.randn(batch, 77, SHAPE.context_dim)}


def measure_step(batch, height, width, *, weights, lora, autocast, checkpointing, attention, gradients_kept):
    """{label: bytes} at the peak of a real forward and backward."""
    net = SMALL.build(lora).to(weights)
    learning = trainables(net).values()
    prepare(net, checkpointing)
    meter = StorageMeter()
    meter.hold(PARAMETERS, [*net.parameters(), *net.buffers()])
    if gradients_kept:
        for parameter in learning:
            parameter.grad = torch.zeros_like(parameter)
        meter.hold(GRADIENTS, [parameter.grad for parameter in learning])
    for parameter in learning:
        parameter.register_post_accumulate_grad_hook(lambda p: meter.hold(GRADIENTS, [p.grad]))
    with attention_of(net, attention), meter:
        training_step(SMALL, net, real_batch(batch, height, width), autocast)
    return meter.terms


@pytest.fixture(scope="module")
def traced():
    made = {}
    return lambda *asked: made.setdefault(asked, TracedTraining(SMALL, *asked))


@pytest.mark.parametrize(
    "weights, lora, autocast, attention, checkpointing, gradients_kept",
    [
        (torch.float32, 0, None, "pytorch", False, False),
        (torch.float32, 0, None, "basic", True, True),
        (torch.float32, 0, torch.bfloat16, "pytorch", True, False),
        (torch.float32, 0, torch.bfloat16, "basic", False, False),
        (torch.bfloat16, 0, None, "pytorch", False, True),
        (torch.bfloat16, 0, None, "pytorch", True, False),
        (torch.float32, 4, None, "pytorch", False, False),
        (torch.float32, 4, torch.bfloat16, "pytorch", True, False),
        (torch.bfloat16, 4, None, "basic", False, True),
    ],
)
def test_a_traced_step_is_a_real_one(traced, weights, lora, autocast, attention, checkpointing, gradients_kept):
    """Never under and at most 15 % over is what is asked; to the byte is what comes out."""
    options = {"autocast": autocast, "checkpointing": checkpointing, "attention": attention}
    said = traced(weights, lora).trace(16, 12, 2, gpu=False, gradients_kept=gradients_kept, **options)
    got = measure_step(2, 16, 12, weights=weights, lora=lora, gradients_kept=gradients_kept, **options)
    assert said.terms == got


@pytest.mark.parametrize("gpu", [False, True], ids=["in a CPU's chunks", "in a GPU's chunks"])
@pytest.mark.parametrize("counts", [(40_000, 20_000, 3_000), (300_000, 90_000, 40_000, 30_000)])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_optimizers_states_and_step_are_those_of_a_real_one(name, counts, gpu):
    seen = []
    state, peak = optimizer_steps.measure_step(
        name, counts, gpu=gpu, moved=lambda parameters: seen.append([p.detach().clone() for p in parameters])
    )
    assert all(not torch.equal(a, b) for a, b in zip(*seen, strict=True))  # it did something
    optimizer = OPTIMIZERS[name]
    assert state == sum(optimizer.states.values()) * sum(counts)
    said = optimizer.step_bytes(counts, gpu=gpu)
    if optimizer.rounding:
        assert peak <= said <= 1.05 * peak
    else:
        assert peak - 256 <= said <= peak  # torch's own step has numbers of its own, too


def test_cuda_autocast_computes_norms_in_fp32(traced):
    options = {"autocast": torch.bfloat16, "checkpointing": False, "attention": "basic"}
    on_cpu, on_gpu = (traced(torch.float32).trace(16, 12, 2, gpu=gpu, **options) for gpu in (False, True))
    assert on_gpu.most > 1.1 * on_cpu.most


def test_checkpointing_trades_activations(traced):
    options = {"autocast": None, "attention": "pytorch", "gpu": False}
    plain, saved = (traced(torch.float32).trace(32, 32, 4, checkpointing=on, **options) for on in (False, True))
    assert saved.most < 0.8 * plain.most and saved.terms[PARAMETERS] == plain.terms[PARAMETERS]


@pytest.mark.parametrize("backend", ["basic", "split", "sub-quadratic", "pytorch"])
def test_a_larger_picture_is_bounded_by_the_smaller_ones_trace(monkeypatch, backend):
    monkeypatch.setitem(NETWORKS, "small", SMALL)
    ask = lambda width, height, batch: estimate_network(  # noqa: E731
        "small", width, height, CPU, batch=batch, backend=backend, dtype="fp32"
    )
    small = ask(128, 128, 1)
    assert small.phases[0].trace.grown(1, 1) >= small.phases[0].working
    for width, height, batch in ((256, 128, 1), (128, 128, 3), (264, 200, 2)):
        large = ask(width, height, batch)
        bound = small.phases[0].trace.grown(small._area(large.latent), batch)
        assert large.phases[0].working <= bound <= 1.6 * large.phases[0].working  # text and odd sides grow along


@pytest.mark.parametrize("name", ["SD1.5", "SDXL"])
def test_the_networks_are_those_of_the_presets(name):
    assert traced_network_shape(NETWORKS[name]) == PRESETS[name]


# ------------------------------------------------------------------------------------------------- what always holds

sizes = st.builds(
    Sizes,
    parameters=st.integers(10**6, 10**11),
    trained=st.integers(1, 10**6),
    largest_unit=st.integers(1, 10**9),
    split=st.floats(0, 1),
    activations=st.integers(0, 10**12),
    compute_bytes=st.sampled_from([2, 4]),
)
optimizers = st.sampled_from(list(OPTIMIZERS.values()))


@given(st.sampled_from(LAYOUTS), st.integers(1, 1024), st.integers(1, 64), optimizers, sizes, st.booleans())
@settings(max_examples=200, deadline=None)
def test_more_gpus_and_more_micro_batches_never_need_more(layout, gpus, micro, optimizer, given_sizes, ema):
    terms = in_layout(layout, gpus, micro, optimizer, given_sizes, ema)
    assert all(isinstance(size, int) and size >= 0 for size in terms.values())
    assert {PARAMETERS, GRADIENTS, "activations", *optimizer.states} <= set(terms) and (EMA in terms) == ema
    alone = in_layout("one GPU", gpus, micro, optimizer, given_sizes, ema)
    assert alone[PARAMETERS] == optimizer.parameters * given_sizes.parameters
    if layout in ("TP", "PP"):
        twice = in_layout(layout, 2 * gpus, micro, optimizer, given_sizes, ema)
        assert sum(twice.values()) <= sum(terms.values()) <= sum(alone.values()) + len(terms)
    if layout == "DDP":
        assert sum(terms.values()) >= sum(alone.values())
    if layout == "FSDP2" and gpus > 1:
        assert terms[PARAMETERS] * gpus >= alone[PARAMETERS]


calls = st.builds(
    AttentionCall,
    batch=st.integers(1, 8),
    heads=st.integers(1, 20),
    q_tokens=st.integers(64, 5000),
    k_tokens=st.integers(1, 5000),
    head_dim=st.sampled_from([40, 64, 128]),
    element_bytes=st.sampled_from([2, 4]),
)
traces = st.builds(
    Trace,
    terms=st.fixed_dictionaries({"activations": st.integers(0, 2**40)}),
    outside=st.integers(0, 2**40),
    moments=st.lists(st.tuples(st.integers(0, 2**40), calls), max_size=3).map(tuple),
    # without those that split keys where few queries are spread over a whole GPU: their partial results shrink as
    # pictures grow (sage among them, which hands on what it cannot do)
    backend=st.sampled_from([name for name in BACKENDS if name not in ("flash", "xformers", "pytorch", "sage")]),
)


@given(traces, st.floats(1, 50), st.floats(1, 50), st.floats(1, 4))
@settings(max_examples=200, deadline=None)
def test_growing_is_monotone(trace, area, batch, more):
    assert trace.grown(area * more, batch) >= trace.grown(area, batch)
    assert trace.grown(area, batch * more) >= trace.grown(area, batch)


@given(st.integers(0, 2**45), st.integers(0, 2**40), st.integers(0, 2**45), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_verdict_is_exact(working, weights, free, gpu):
    machine = Machine(free, free, gpu, "")
    found = judge(working, weights, machine)
    need = working + sum(overhead(machine, working).values())
    assert found.short == need + weights - free
    assert found.fits == (need <= free if gpu else need + weights <= free)  # main memory has nowhere to offload to
    assert judge(working + 1, weights, machine).short >= found.short


# xformers is left out: where few queries are spread over a whole GPU, its partial results shrink as they grow
@given(calls, st.sampled_from([backend for backend in VAE_ATTENTION if backend != "xformers"]), st.integers(1, 3000))
@settings(max_examples=200, deadline=None)
def test_the_attention_of_a_vae_grows_with_the_picture(call, backend, more):
    call = dataclasses.replace(call, heads=1, k_tokens=call.q_tokens, head_dim=512, gpu=False)
    larger = dataclasses.replace(call, q_tokens=call.q_tokens + more, k_tokens=call.q_tokens + more)
    assert vae_attention_bytes(larger, backend) > vae_attention_bytes(call, backend) >= call.query


def answer(machine=CPU, most=10**9, **asked):
    question = TrainingQuestion(**asked)
    question.check()
    count = 10**8
    trace = StepTrace({PARAMETERS: 4 * count, "activations": most, GRADIENTS: 4 * count}, most)
    saved = StepTrace({**trace.terms, "activations": most // 3}, most // 3)
    return TrainingEstimate(question, machine, Sizes(count, count, 10**7, 0.5, most, 2), (10**6,) * 100, trace, saved)


@given(st.integers(1, 64), st.sampled_from(list(LAYOUTS)), st.integers(1, 64), st.integers(2**20, 2**42), st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_training_gets_a_whole_answer(batch, layout, gpus, free, gpu):
    found = answer(Machine(free, free, gpu, ""), batch=batch, layout=layout, gpus=gpus)
    assert found.total == sum(found.terms().values())
    assert found.verdict.startswith(("fits with ", "does not fit; "))
    assert (found.largest_batch >= batch) <= (found.total <= free)
    assert found.advice().endswith(".") and all(after < found.total for _, after, _ in found.changes())
    assert "Verdict: " in found.report() and f"{found.total:,}" in found.report()


def test_7_b_parameters():
    """FACTS: 7 B parameters in FP32 are 28 GB of weights alone; AdamW keeps 16 bytes for each, pure BF16 12 to 16."""
    seven = Sizes(7 * 10**9, 7 * 10**9, 10**8, 0.9, 0, 2)
    assert in_layout("one GPU", 1, 1, OPTIMIZERS["AdamW"], seven, False)[PARAMETERS] == 28 * 10**9
    assert [optimizer.per_parameter for optimizer in OPTIMIZERS.values()] == [16, 16, 12, 14, 16, 8, 10, 12]
    ema = in_layout("one GPU", 1, 1, OPTIMIZERS["AdamW"], seven, True)
    assert sum(ema.values()) == 140 * 10**9


def test_what_to_change_first_is_the_cheapest_that_is_enough():
    total = answer(batch=1).total
    enough = Machine(int(0.85 * total), 2**40, False, "")
    assert answer(enough, batch=1).advice().startswith("Change first: gradient checkpointing, which is enough")
    little = Machine(2**28, 2**40, False, "")
    assert answer(little, batch=1).advice().startswith("Change first: FSDP2 on 8 GPUs (")
    assert answer(batch=1).advice().startswith("It fits as it is.")


def test_bf16_weights_are_proposed_as_pure_bf16_takes_them():
    """Its default is kahan; stochastic rounding saves more, has to be asked for, and comes after it."""
    asked = answer(batch=1)
    offered = {words: asked.total - after for words, after, _ in asked.changes() if "pure_bf16" in words}
    count = asked.sizes.parameters
    assert offered == {"pure_bf16 (rounding kahan)": 2 * count, "pure_bf16, rounding stochastic": 4 * count}
    assert list(offered) == sorted(offered, key=offered.get)


def test_adapters_alone_have_gradients_states_and_an_average(monkeypatch):
    monkeypatch.setitem(NETWORKS, "small", SMALL)
    adapters, whole = (
        estimate_training(TrainingQuestion(network="small", width=128, height=128, lora_rank=rank), planned_machine(8))
        for rank in (2, 0)
    )
    trained = adapters.sizes.trained
    assert adapters.sizes.parameters - trained == whole.sizes.parameters == whole.sizes.trained
    assert trained == sum(adapters.counts) < whole.sizes.parameters / 10
    terms = adapters.moments()[STEP]
    assert terms[PARAMETERS] >= 4 * adapters.sizes.parameters
    assert (terms[GRADIENTS], terms["moments"], terms[EMA]) == (4 * trained, 8 * trained, 4 * trained)
    assert adapters.total < whole.total
    assert f", {trained:,} of them trained (LoRA)" in adapters.report() and "LoRA of rank 2" in adapters.title
    assert adapters.terms("DDP")["gradient buckets"] == 4 * trained


def test_the_average_of_bf16_weights_is_a_moment_of_its_own():
    moments = answer(optimizer="AdamW, bf16 Kahan").moments()
    assert moments["average"]["temporaries"] == 4 * 10**6  # one weight after another
    assert "average" not in answer().moments() and STEP in answer().moments()


# ------------------------------------------------------------------------------------------------------ what is said


@pytest.mark.parametrize(
    "wrong",
    [{"width": 0}, {"height": 7}, {"width": 10**9}, {"batch": 0}, {"accumulation": 0}, {"gpus": 0}, {"network": "x"},
     {"optimizer": "SGD"}, {"layout": "ring"}, {"lora_rank": -1}, {"attention": "sage"}, {"precision": "fp8"}],
)  # fmt: skip
def test_impossible_questions_name_the_field(wrong):
    with pytest.raises(BadInput, match=f"^{next(iter(wrong))}: expected .*, got .*\\.$"):
        TrainingQuestion(**wrong).check()


def test_bf16_weights_do_not_compute_in_fp32():
    with pytest.raises(BadInput, match="^precision: .* so expected bf16, got fp32"):
        TrainingQuestion(optimizer="AdamW, bf16 Kahan", precision="fp32").check()
    with pytest.raises(BadInput, match="^width: expected 8 to 131072 pixels"):
        estimate_network("SD1.5", 1, 64, CPU)
    with pytest.raises(BadInput, match="^model: expected one of "):
        estimate_network("Flux", 64, 64, CPU)


def test_an_odd_size_has_a_whole_answer(monkeypatch):
    monkeypatch.setitem(NETWORKS, "small", SMALL)
    found = estimate_training(TrainingQuestion(network="small", width=123, height=77, batch=1), planned_machine(8))
    assert found.total == sum(found.terms().values()) and found.other.most != found.asked.most
    model = estimate_network("small", 123, 77, planned_machine(8))
    assert model.pixels == (120, 72) and model.columns()["sampling"][WEIGHTS] == model.weights
    assert f"Largest that fits: {model.largest_size[0]}x" in model.report()
    tight = dataclasses.replace(model, machine=planned_machine(0.1))
    assert tight.verdict.startswith("does not fit, nor does any smaller size") and tight.largest_batch == 0


def test_the_command_prints_both_tables(capsys, monkeypatch, tmp_path):
    from training.__main__ import main

    monkeypatch.setitem(NETWORKS, "small", SMALL)
    asked = ["--model", "pixel-small", "--size", "32x32", "--memory", "8"]
    assert main(["estimate", "training", *asked, "--chart", str(tmp_path / "chart.png")]) == 0
    said = capsys.readouterr().out
    assert "AdamW, bf16 Kahan" in said and "FSDP2 x 8" in said and (tmp_path / "chart.png").stat().st_size > 10_000
    assert main(["estimate", "model", *asked]) == 0
    assert "sampling" in capsys.readouterr().out
    assert main(["estimate", "model", "--size", "0x32", "--model", "SD1.5"]) == 1
    assert capsys.readouterr().err.startswith("error: width: expected 8 to 131072 pixels")
