"""Attention in closed form: the known numbers to the byte, and what must hold for every size."""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from training.errors import BadInput
from training.memory.attention import BACKENDS, MATERIALISED, TERMS, AttentionCall, attention_peak, score_matrices
from training.memory.estimate import DTYPES, SIZES, estimate_attention, in_words
from training.memory.machine import GIB, Machine, planned_machine
from training.memory.models import LARGEST_SIDE, PRESETS

ROOT = Path(__file__).resolve().parents[2]
SD15, SDXL = PRESETS["SD1.5"], PRESETS["SDXL"]
ALL_FREE = planned_machine(2**20)
CHUNKED = ("split", "sub-quadratic")


def ask(shape=SD15, width=768, height=768, machine=ALL_FREE, **more):
    return estimate_attention(shape, width, height, machine, **more)


# ------------------------------------------------------------------------------------------------- the known numbers


@pytest.mark.parametrize("dtype, latent, scores", [("bf16", 73_728, 2_717_908_992), ("fp32", 147_456, 5_435_817_984)])
def test_sd15_at_768_to_the_byte(dtype, latent, scores):
    answer = ask(dtype=dtype, cfg=False, backend="basic")
    assert answer.latent_bytes == latent
    assert answer.tokens == 96 * 96 == 9216
    assert score_matrices(1, 8, 9216, 9216, DTYPES[dtype]) == scores
    layer, peak = answer.peak_layer()
    assert (layer.name, layer.count) == ("self, full", 5)
    assert peak.terms["scores"] + peak.terms["softmax"] == scores


def test_sdxl_attends_at_a_half_and_a_quarter_only():
    tokens = [(SDXL.tokens(level, SDXL.latent(768, 768)), level.heads, level.self_layers) for level in SDXL.levels]
    assert tokens == [(2304, 10, 10), (576, 20, 60)]


def test_pytorchs_math_fallback_upcasts_and_copies():
    """batch 2, 10 heads, 4032 tokens, bf16: one score matrix is 620 MiB, PyTorch's default peaked at 2602 MiB."""
    call = AttentionCall(2, 10, 4032, 4032, 64, 2, half_math=False)
    assert call.scores(4032, 4032, 2) // 2**20 == 620
    assert attention_peak(call, "pytorch math").total / 2**20 == pytest.approx(2602, rel=0.02)
    assert attention_peak(call, "pytorch").total < 50 * 2**20


def test_sizes_are_treated_as_the_host_treats_them():
    latent = SD15.latent(1366, 769)
    assert (latent.width, latent.height) == (170, 96)
    assert [SD15.tokens(level, latent) for level in SD15.levels] == [170 * 96, 85 * 48, 43 * 24, 22 * 12]
    flux, wan = PRESETS["Flux"], PRESETS["Wan 14B"]
    assert flux.tokens(flux.levels[0], flux.latent(1000, 1000)) == 63 * 63  # 125 cells, padded to 126
    clip = wan.latent(832, 480, frames=81)
    assert (clip.batch, clip.frames, wan.tokens(wan.levels[0], clip)) == (1, 21, 21 * 30 * 52)
    assert SD15.latent(64, 64, batch=2, frames=3).batch == 6  # a picture model takes frames as pictures


def test_cfg_doubles_the_batch_of_the_network_but_not_the_latent():
    one, two = ask(cfg=False), ask(cfg=True)
    assert two.attention.total == 2 * one.attention.total
    assert two.latent_bytes == one.latent_bytes


# ------------------------------------------------------------------------------------------ what holds for every size

calls = st.builds(
    AttentionCall,
    batch=st.integers(1, 8),
    heads=st.integers(1, 24),
    q_tokens=st.integers(1, 40_000),
    k_tokens=st.integers(1, 40_000),
    head_dim=st.integers(1, 320),
    element_bytes=st.sampled_from([2, 4]),
    upcast=st.booleans(),
    split_heads=st.booleans(),
    half_math=st.booleans(),
    gpu=st.booleans(),
    free=st.integers(0, 2**36),
).map(lambda call: dataclasses.replace(call, upcast=call.upcast and call.element_bytes == 2))
backends = st.sampled_from(BACKENDS)


@given(calls, backends)
@settings(max_examples=200, deadline=None)
def test_terms_are_named_positive_and_sum_to_the_total(call, backend):
    peak = attention_peak(call, backend)
    assert set(peak.terms) <= set(TERMS) and all(size > 0 for size in peak.terms.values())
    assert sum(peak.terms.values()) == peak.total
    assert peak.terms["inputs"] == call.inputs
    assert peak.total >= call.inputs + call.query or peak.refused  # the result has to go somewhere
    assert peak.runs in BACKENDS and (peak.runs == backend or peak.notes)


@given(calls, backends, st.sampled_from(["batch", "q_tokens", "k_tokens", "heads"]), st.integers(1, 5000))
@settings(max_examples=200, deadline=None)
def test_more_of_anything_never_needs_less(call, backend, field, more):
    """But for two things that shrink on purpose: chunks where memory is short (so all is free here), and the partial
    results by which the fused kernels spread a few queries over a whole GPU."""
    call = dataclasses.replace(call, free=2**63)
    larger = dataclasses.replace(call, **{field: getattr(call, field) + more})
    small, large = attention_peak(call, backend), attention_peak(larger, backend)
    spread = small.terms.get("workspace", 0) if small.runs in ("pytorch", "flash", "xformers") else 0
    assert large.total >= small.total - spread


@given(calls, backends)
@settings(max_examples=200, deadline=None)
def test_four_bytes_need_at_least_what_two_bytes_need(call, backend):
    assume(backend not in ("sage", "flash") and not call.gpu)  # sage and flash do not take FP32 and fall back
    half = dataclasses.replace(call, element_bytes=2, upcast=False, half_math=True, free=2**63)
    full = dataclasses.replace(half, element_bytes=4)
    assert attention_peak(full, backend).total >= attention_peak(half, backend).total


@given(st.integers(2000, 60_000), backends, st.sampled_from([40, 64, 128]))
@settings(max_examples=200, deadline=None)
def test_quadratic_in_tokens_only_where_scores_are_materialised(tokens, backend, size):
    small = attention_peak(AttentionCall(2, 8, tokens, tokens, size, 2, free=2**33), backend).total
    large = attention_peak(AttentionCall(2, 8, 4 * tokens, 4 * tokens, size, 2, free=2**33), backend).total
    if backend in MATERIALISED:
        assert large > 10 * small
    elif backend not in CHUNKED:
        assert large <= 4.2 * small


@given(st.integers(256, 20_000), st.integers(20, 34))
@settings(max_examples=100, deadline=None)
def test_cutting_keeps_its_promise(tokens, power):
    """Where they cut, the scores of a chunk stay below what is free; less free memory never means more of it used."""
    call = AttentionCall(2, 8, tokens, tokens, 64, 2, free=2**power)
    for backend in CHUNKED:
        peak = attention_peak(call, backend)
        cut = not (backend == "split" and any("all at once" in note for note in peak.notes))
        if cut and peak.refused is None and not any("keys" in note for note in peak.notes):
            assert peak.terms.get("scores", 0) + peak.terms.get("softmax", 0) <= call.free


sides = st.one_of(st.sampled_from([8, 9, 768, 8192, LARGEST_SIDE]), st.integers(8, 20_000))
shapes = st.sampled_from(list(PRESETS.values()))


@given(shapes, sides, sides, st.integers(1, 64), st.integers(1, 200), st.sampled_from(sorted(DTYPES)), backends)
@settings(max_examples=100, deadline=None)
def test_every_size_gets_a_whole_answer(shape, width, height, batch, frames, dtype, backend):
    answer = ask(shape, width, height, planned_machine(24), batch=batch, frames=frames, dtype=dtype, backend=backend)
    assert answer.need == answer.weights + 2 * answer.latent_bytes + answer.attention.total
    assert answer.attention.total == max(peak.total for peak in answer.peaks())
    assert answer.verdict.startswith(("fits with ", "fits if the host offloads ", "does not fit"))
    fitting = answer.fitting
    if answer.fits:
        assert fitting == tuple(side // shape.vae * shape.vae for side in (width, height))
    elif any(fitting):
        assert dataclasses.replace(answer, width=fitting[0], height=fitting[1]).fits
        assert fitting[0] <= width + shape.step and fitting[1] <= height


fields = st.sampled_from(["width", "height", "batch", "frames"])


@given(shapes, fields, st.integers(1, 4000), st.integers(8, 3000), backends)
@settings(max_examples=200, deadline=None)
def test_a_larger_picture_never_needs_less(shape, field, more, side, backend):
    small = {"width": side, "height": side, "batch": 2, "frames": 5}
    large = {**small, field: small[field] + more}
    machine = Machine(2**63, 2**63, False, "")
    one, two = (ask(shape, backend=backend, machine=machine, **question) for question in (small, large))
    assert two.latent_bytes >= one.latent_bytes and two.tokens >= one.tokens
    spread = one.attention.terms.get("workspace", 0) if backend in ("flash", "xformers") else 0  # as above
    assert two.need >= one.need - spread


@pytest.mark.parametrize("size", [0, 1, 7, -8, LARGEST_SIDE + 1, 10**12])
@pytest.mark.parametrize("side", ["width", "height"])
def test_a_size_that_no_latent_has_is_one_sentence(side, size):
    with pytest.raises(BadInput, match=f"^{side}: expected 8 to {LARGEST_SIDE} pixels .*, got {size}\\.$"):
        ask(**{side: size})


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"frames": 0}, {"dtype": "fp8"}, {"backend": "fast"}, {"text": -1}, {"batch": 10**9}]
)
def test_other_impossible_questions_name_the_field(wrong):
    with pytest.raises(BadInput, match=f"^{next(iter(wrong))}: expected "):
        ask(**wrong)


# --------------------------------------------------------------------------------------------------- what is said


def test_the_three_verdicts():
    spare = ask(SDXL, 1366, 768, planned_machine(8), backend="pytorch")
    assert spare.verdict.startswith("fits with 3.18 GiB to spare (")
    offload = ask(SDXL, 768, 768, planned_machine(4), backend="pytorch")
    assert offload.verdict.startswith("fits if the host offloads 824 MiB of weights (")
    never = ask(SD15, 1920, 1080, planned_machine(4), backend="pytorch math")
    width, height = never.fitting
    assert never.verdict.startswith(f"does not fit; {width}x{height} is the largest 16:9 that does (")
    assert width / height == pytest.approx(16 / 9, abs=0.02)
    assert not dataclasses.replace(never, width=width + 32, height=height + 16).fits
    assert ask(machine=planned_machine(1e-4), backend="basic").verdict.startswith("does not fit, nor does any smaller")


def test_spare_and_missing_bytes_are_exact():
    answer = ask(backend="pytorch")
    at = lambda free: dataclasses.replace(answer, machine=Machine(free, free, True, ""))  # noqa: E731
    assert at(answer.need).verdict.startswith("fits with 0 B")
    assert at(answer.need - 1).verdict.startswith("fits if the host offloads 1 B")
    assert at(answer.need - answer.weights).fits and not at(answer.need - answer.weights - 1).fits
    # the weights of a network without a GPU are in main memory already
    here = dataclasses.replace(answer, machine=Machine(answer.need - 1, 2**40, False, ""))
    assert not here.fits and here.verdict.startswith("does not fit")


def test_split_refuses_like_the_host():
    answer = ask(SDXL, 4096, 4096, planned_machine(0.5), backend="split")
    assert "more than 64 steps" in answer.refused and answer.verdict.startswith("does not fit; ")


def test_report_names_backend_measurement_and_what_is_missing():
    text = ask(SDXL, 1366, 768, planned_machine(8), backend="sage", dtype="fp32").report()
    assert "SDXL, 1360x768 (from 1366x768: the VAE works in steps of 8)" in text
    assert "Backend: sage, not measured." in text and "sage takes half precision only" in text
    assert "Latent: 1 x 4 x 96 x 170 = 261,120 bytes." in text
    assert "Not counted:" in text and all(backend in text for backend in BACKENDS)
    assert ask(backend="auto", auto="split").report().count("split (auto), measured on the CPU") == 1


@pytest.mark.parametrize("size, words", [(0, "0 B"), (2_717_908_992, "2.53 GiB"), (2**43, "8.00 TiB")])
def test_bytes_in_words(size, words):
    assert in_words(size) == words


def test_chart_is_a_picture_and_an_estimate_takes_no_two_seconds():
    from training.memory.chart import attention_chart

    attention_chart(ask())  # matplotlib is imported once a process
    began = time.process_time()
    chart = attention_chart(ask(SDXL, 1344, 768, planned_machine(8)))
    assert time.process_time() - began < 2
    assert chart.size == (1280, 720) and chart.mode == "RGB"
    assert len(chart.getcolors(2**20)) > 20


def test_sizes_say_what_they_are():
    assert all(f"{width}x{height}" == name for name, (width, height) in SIZES.items())


# ------------------------------------------------------------------------------------------------------ command line


def run(*arguments):
    command = [sys.executable, "-m", "training", "estimate", "attention", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command_prints_the_same_table():
    ran = run("--model", "SD1.5", "--size", "768x768", "--dtype", "fp32", "--backend", "basic", "--memory", "16")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == ask(machine=planned_machine(16), dtype="fp32", backend="basic").report()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--size", "0x768"), "error: width: expected 8 to 131072 pixels"),
        (("--size", "large"), "error: --size: expected WIDTHxHEIGHT, such as 768x768, got 'large'."),
        (("--size", "768x768", "--memory", "-1"), "error: --memory: expected GiB above 0"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(arguments, said):
    from training.__main__ import main

    ran = run(*arguments) if arguments[1] == "large" else None
    if ran:
        assert (ran.returncode, ran.stderr.strip()) == (1, said)
    else:
        with pytest.MonkeyPatch.context() as patch:
            lines = []
            patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
            assert main(["estimate", "attention", *arguments]) == 1
        assert lines[0].startswith(said)


def test_without_a_gpu_the_table_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert "no CUDA device here, so this is the main memory" in run("--size", "64x64").stdout


def test_a_gib_is_a_gib():
    assert planned_machine(8).free == 8 * GIB
