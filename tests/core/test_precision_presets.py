"""Ready-made plans: what each says, and that they ask the device where they promise to."""

import pytest
import torch

from training.errors import BadInput
from training.precision import presets
from training.precision.device import Support
from training.precision.plan import PrecisionPlan
from training.precision.presets import PRESETS, preset_plan

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_json_and_gives_reasons(name):
    plan = preset_plan(name, CPU)
    assert PrecisionPlan.from_json(plan.to_json()) == plan
    assert all(why and why[0] != " " for why in plan.reasons.values())


@pytest.mark.parametrize("name", ["recommended", "article", "quality", "auto"])
def test_a_decoder_is_only_left_out_of_float32_on_purpose(name):
    assert preset_plan(name, CPU).vae_decoder in ("fp32", "auto")


def test_recommended_leaves_the_text_encoders_as_loaded():
    plan = preset_plan("recommended", CPU)
    assert (plan.model_compute, plan.vae_encoder, plan.clip) == ("bf16", "bf16", {})
    assert "three more bits" in plan.reasons["clip"]


def _device(monkeypatch, bf16, fp16):
    found = {torch.bfloat16: bf16, torch.float16: fp16}
    monkeypatch.setattr(presets, "support", lambda _device, dtype: found[dtype])


EMULATED, NATIVE = Support(True, False, "this GPU emulates bf16"), Support(True, True)
ABSENT = Support(False, False, "no")


def test_fast_takes_what_the_device_has_in_hardware(monkeypatch):
    _device(monkeypatch, NATIVE, NATIVE)
    assert preset_plan("fast", CPU).model_compute == "bf16"
    _device(monkeypatch, EMULATED, NATIVE)
    plan = preset_plan("fast", CPU)
    assert (plan.model_compute, plan.keep, plan.vae_decoder) == ("fp16", ("norms",), "fp32")
    assert plan.reasons["model"].startswith("FP16: this GPU emulates bf16")
    _device(monkeypatch, EMULATED, ABSENT)
    plan = preset_plan("fast", CPU)
    assert (plan.model_compute, plan.vae_encoder) == ("fp32", "fp32") and "no" in plan.reasons["model"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("[]", "a JSON object"),
        ("{", "must be JSON"),
        ('{"unet": "bf16"}', "it got unet"),
        ('{"model_compute": "fp8_e4m3fn"}', "got 'fp8_e4m3fn'"),
        ('{"clip": {"all": "bf16"}}', "clip must give"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_sentence(text, words):
    with pytest.raises(BadInput, match=words):
        PrecisionPlan.from_json(text)
