"""The audit on the host's own VAE, CLIP and MODEL; the numbers come from tests/host/audit_in_host.py, run once.

The VAE has learnt a little (tests/host/trained_vae.py), so what is compared are pictures.
"""

import json

import pytest

from tests.host.checkpoints import MIN, make_checkpoints
from tests.host.conftest import STATE
from tests.host.host_process import run_in_host


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    (made,) = make_checkpoints(host_path, folder / "checkpoints", (MIN,), cache=STATE / "checkpoints")
    return run_in_host("audit_in_host.py", host_path, folder, REF2V_CHECKPOINT=str(made))


def test_trained_vae_in_every_dtype(check):
    assert check["like the picture"] > 0.6  # a soft one
    decoder, encoder = check["errors"]["decoder"], check["errors"]["encoder"]
    for name, by_hand in check["psnr by hand"].items():
        assert decoder[name]["psnr"] == pytest.approx(by_hand, abs=1e-3)  # what the host's own VAE gives in that dtype
        assert decoder[name]["finite"] and decoder[name]["colour_99"] > decoder[name]["colour"] > 0
        assert 0.9 < decoder[name]["ssim"] <= 1
    assert decoder["fp16"]["psnr"] > decoder["bf16"]["psnr"] + 12  # three more bits are 18 dB
    assert decoder["fp16"]["fine"] < decoder["bf16"]["fine"] - 12
    assert check["so far"]["bf16"] > 4 * check["so far"]["fp16"]
    assert encoder["bf16"]["psnr"] > 20
    assert f"bf16 decode: {decoder['bf16']['psnr']:.1f} dB against FP32" in check["report"]
    assert min(check["layers"]) > 40 and 0 < check["own"]["fp16"] < check["own"]["bf16"] < 0.05
    assert check["findings"] == []
    assert check["differences"][0] == 6 and check["differences"][2] >= 512 and check["chart"][-1] > 0.05
    plan = json.loads(check["plan"])
    costs_nothing = [
        name for name in ("bf16", "fp16")
        if check["native"][name] and decoder[name]["colour_99"] < 1 and check["range used"][name] < 0.5
    ]  # fmt: skip
    assert plan["vae_decoder"] == [*costs_nothing, "fp32"][0]
    assert plan["model_compute"] == "default" and plan["clip"] == {}
    assert set(plan["reasons"]) == {"VAE encoder", "VAE decoder"}
    assert check["unchanged"] and check["again"]


def test_an_overflow_is_named(check):
    assert check["over"][0].startswith("- taesd_decoder.12: ")
    assert not any("encoder" in line for line in check["over"])
    assert "fp16 decode: NaN or infinity: the picture would be black" in check["report"]
    assert check["plan"] == "fp32"


def test_vae_of_a_selector(check):
    assert check["same"] and check["again"]
    assert "FP32 compute over those" in check["rounded"] and "Load VAE (Precision)" in check["rounded"]


@pytest.mark.parametrize(("name", "encodes"), [("TAEHV", True), ("TAEHV of Wan 2.2", False)])
def test_other_vaes(check, name, encodes):
    found = check[name]
    parts = ["VAE encoder", "VAE decoder"] if encodes else ["VAE decoder"]
    assert found["parts"] == parts == sorted(found["choices"], reverse=True)
    assert 10 < found["error"] <= 100 and min(found["layers"]) > 20
    assert any("only decodes" in note for note in found["notes"]) != encodes


def test_clip_encoders(check):
    computed, stored = check["said"]
    assert computed.startswith("computed in bf16: relative error ") and stored.startswith("stored in bf16: ")
    assert float(stored.split("relative error ")[1].split(",")[0]) == pytest.approx(check["stored by hand"], rel=0.05)
    assert 1e-4 < check["computed"] < 0.1 and check["layers"] > 20
    plan = json.loads(check["plan"])
    assert plan["clip"].keys() == {"clip_l"} and plan["clip"]["clip_l"][0] == "default"
    assert "stored as loaded" in plan["reasons"]["clip_l"]
    assert check["differences"][0] == 1
    assert check["unchanged"] and check["again"]


def test_model_at_sigmas(check):
    for line, kinds in check["dtypes"].items():
        assert kinds == ["torch.float32" if "FP32" in line else "torch.bfloat16"], line
    assert len(check["dtypes"]) == 4 and len(check["said"]) == 2
    errors = [float(said[0].split("relative error ")[1].split(",")[0]) for said in check["said"].values()]
    assert all(1e-4 < error < 0.1 for error in errors)
    assert min(check["layers"]) > 40 and {"norm", "attention", "embedding"} <= set(check["kinds"])
    dtype, why = check["choice"]
    if check["native"]:
        assert dtype == ("bf16" if max(errors) <= 0.02 else "fp32") and why.startswith("sigma ")
        assert f"relative error {max(errors):.2e}" in why or dtype == "bf16"
    else:
        assert dtype == "fp32" and why.endswith(", so it saves no time")
    report = check["report"]
    assert "The model denoises the latent of the picture." in report and "bf16 prediction, decoded: " in report
    assert "Conditioning of the model: the prompt, by the clip linked." in report
    assert "zeros, since neither" in check["zeros"] and "pure noise, 8 x 8 cells" in check["zeros"]
    assert check["differences"][0] == 1
    assert check["unchanged"] and check["again"] and check["clones left"] == 0


def test_lora_counts(check):
    assert check["differs"] and check["still patched"]


def test_reference_is_float32_whatever_another_pack_allows(check):
    assert check["after"] == "medium"
    in_fp32 = {"VAE encoder in FP32", "VAE decoder in FP32", "CLIP as loaded", "MODEL at sigma 1 in FP32"}
    assert in_fp32 <= check["seen"].keys()
    for line, found in check["seen"].items():
        if line in in_fp32:
            assert found == ["highest"], line
        elif "decoded" not in line:  # where both a BF16 and an FP32 half run
            assert found == ["medium"], line


def test_nothing_is_left_to_collect_when_the_host_unloads(check):
    assert check["unloads"] > 0 and check["collected before"]


def test_what_is_refused(check):
    assert "at least one of model, clip and vae" in check["nothing"]
    for name, kind in (("sound", "sound"), ("music", "sound"), ("shape", "shapes in space")):
        assert f"is one of {kind}; the audit needs one of pictures or video." in check[name], check[name]
    assert "can only encode; the audit needs one that gives a picture back" in check["encoder alone"]
    assert "The VAE (TAESD) cannot encode a picture of [1, 64, 64, 3] as those of pictures" in check["odd picture"]
    assert "NaN or infinity in FP32 already" in check["broken"]
    assert "got 99" in check["sigma"] and "'soon'" in check["word"] and "got 120%" in check["percent"]
    assert "sigmas is empty" in check["empty"] and "'fp5'" in check["dtype"]
    assert "no text encoder that is known" in check["clip"]


def test_stop_is_heard(check):
    assert check["raised"] == "InterruptProcessingException" and len(check["lines"]) == 2
    assert check["hooks"] == 0 and check["cast"] == "None"
