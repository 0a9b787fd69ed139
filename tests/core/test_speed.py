"""precision auto, TF32, torch.compile and channels last: what they do, what is said, and what stays as it was."""

import json

import pytest
import torch

from training.config.train_config import TrainConfig
from training.errors import BadInput
from training.objectives.residual.file import load_meta, load_refiner
from training.precision.advice import automatic_precision
from training.precision.device import support
from training.precision.speed import channels_last_sentence, has_tf32, tf32_sentence
from training.run.process_settings import tf32_allowed
from training.run.train import train

CPU = torch.device("cpu")
BRIEF = {"validation__pictures": 0, "epochs": 1}


# ---- precision auto --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_is_bf16_where_the_device_has_it_in_hardware(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    found = support(torch.device(device), torch.bfloat16)
    chosen, why = automatic_precision(torch.device(device))
    assert chosen == ("bf16" if found.runs and found.native else "fp32")
    assert why == (found.why or "this device has it in hardware")


def test_a_run_of_auto_is_the_run_of_what_it_came_to(configure, watch, tmp_path):
    precision, _ = automatic_precision(CPU)
    watcher = watch()
    auto = watcher.train(configure(precision="auto", **BRIEF))
    named = watch().train(configure(run=tmp_path / "named", precision=precision, **BRIEF))
    assert auto.refiner.read_bytes() == named.refiner.read_bytes()
    assert load_meta(auto.refiner).training["config"]["precision"] == precision
    kept = json.loads((auto.folder / "config.json").read_text())
    assert kept["identity"]["precision"] == kept["config"]["precision"] == precision
    assert any(text.startswith(f"precision {precision}: ") for text in watcher.messages)
    for same in ({"precision": "auto"}, {"precision": precision}):
        assert watch().train(configure(**same, **BRIEF)).status == "reused"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_of_auto_stays_what_it_began_as_on_a_device_that_would_choose_otherwise(configure, watch, precision):
    watch(stop_after=2).train(configure(precision=precision, **BRIEF))
    result = watch().train(configure(precision="auto", **BRIEF))
    assert result.status == "done" and load_meta(result.refiner).training["config"]["precision"] == precision


def test_auto_is_no_fp16_run(configure, watch):
    watch(stop_after=2).train(configure(precision="fp16", **BRIEF))
    with pytest.raises(BadInput, match="precision 'fp16' -> '(fp32|bf16)'"):
        watch().train(configure(precision="auto", **BRIEF))


def test_the_default_is_what_it_was():
    assert TrainConfig.build({"dataset": "d", "run": "r"}).precision == "fp32"


# ---- TF32 ------------------------------------------------------------------------------------------------------------


def test_tf32_is_allowed_within_the_block_alone(monkeypatch):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for convolutions in (False, True):
        torch.backends.cudnn.allow_tf32 = convolutions
        with tf32_allowed(True):
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (before[0], convolutions)
        with pytest.raises(ZeroDivisionError), tf32_allowed(True):
            1 / 0  # noqa: B018
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (before[0], convolutions)
        with tf32_allowed(False):
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (before[0], convolutions)
    torch.backends.cudnn.allow_tf32 = before[1]


def test_on_a_device_without_it_tf32_says_that_it_does_nothing(configure, watch, tmp_path):
    assert not has_tf32(CPU) and tf32_sentence(CPU) == "tf32: cpu has no TF32, so float32 stays float32"
    seen = set()

    class Looking(watch):
        def on_step(self, *given):
            super().on_step(*given)
            seen.add(torch.get_float32_matmul_precision())

    watcher = Looking()
    result = watcher.train(configure(tf32=True, **BRIEF))
    assert seen == {"highest"} and tf32_sentence(CPU) in watcher.messages
    plain = watch().train(configure(run=tmp_path / "plain", **BRIEF))
    one, other = (load_refiner(path)[0] for path in (result.refiner, plain.refiner))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_tf32_changes_the_last_places():
    if not has_tf32(torch.device("cuda")):
        pytest.skip("this GPU has none")
    a = torch.randn(512, 512, device="cuda")
    exact = a @ a
    with tf32_allowed(True):
        assert not torch.equal(a @ a, exact)
    assert torch.equal(a @ a, exact)


# ---- channels last ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
def test_channels_last_learns_the_same_and_a_resumed_run_ends_with_its_bytes(configure, watch, tmp_path, precision):
    settings = {"channels_last": True, "precision": precision, "validation__pictures": 0}
    watcher, ordinary = watch(), watch()
    whole = watcher.train(configure(run=tmp_path / "whole", **settings))
    watch(stop_after=5).train(configure(**settings))
    resumed = watch().train(configure(**settings))
    assert resumed.refiner.read_bytes() == whole.refiner.read_bytes()
    ordinary.train(configure(run=tmp_path / "plain", precision=precision, validation__pictures=0))
    # AdamW's first steps go by the sign of a gradient, so weights of next to no gradient differ; the losses tell
    assert watcher.losses == pytest.approx(ordinary.losses, rel=1e-3 if precision == "fp32" else 5e-2)


def test_channels_last_says_where_nothing_is_gained():
    assert channels_last_sentence(CPU, torch.float32).endswith("on cpu in float32 no gain is to be expected")


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def test_a_machine_that_cannot_compile_is_told_so_before_anything_is_written(configure, watch, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no C++ compiler\nfound")

    monkeypatch.setattr(torch, "compile", lambda function: fails)
    config = configure(compile=True, **BRIEF)
    said = r"^compile: expected a machine on which torch.compile works, .* \(no C\+\+ compiler\); false"
    with pytest.raises(BadInput, match=said) as caught:
        watch().train(config)
    assert "\n" not in str(caught.value) and not config.run.exists()


@pytest.mark.full  # the compiler takes minutes
def test_a_compiled_run_learns_what_a_plain_one_does_and_is_resumed(configure, watch, tmp_path):
    settings = {"compile": True, "validation__pictures": 1, "epochs": 1}
    try:
        watch(stop_after=2).train(configure(**settings))
    except BadInput as problem:
        pytest.skip(str(problem))
    resumed, ordinary = watch(), watch()
    compiled = resumed.train(configure(**settings))
    plain = ordinary.train(configure(run=tmp_path / "plain", validation__pictures=1, epochs=1))
    assert load_refiner(compiled.refiner)[0].keys() == load_refiner(plain.refiner)[0].keys()
    assert resumed.losses == pytest.approx(ordinary.losses[2:], rel=1e-3)
    assert compiled.report["choices"] != plain.report["choices"]
    assert train(configure(**settings)).status == "reused"
