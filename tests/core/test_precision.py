"""Dtypes by name, what a device can do, and what "auto" picks."""

import pytest
import torch

from training.precision import device as devices
from training.precision import policy
from training.precision.device import Support, stores, support
from training.precision.dtypes import COMPUTE, DTYPES, dtype_name
from training.precision.policy import DIFFUSION_MODEL, TEXT_ENCODER, VAE_DECODER, VAE_ENCODER, automatic
from training.precision.resolve import resolve_storage

CPU = torch.device("cpu")


def test_names_and_dtypes_go_both_ways():
    assert all(dtype_name(dtype) == name for name, dtype in DTYPES.items())
    assert dtype_name(torch.float64) == "float64"
    assert set(COMPUTE) < set(DTYPES)


def test_every_device_computes_in_float32():
    assert support(CPU, torch.float32) == Support(True, True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_a_dtype_that_cannot_compute_is_found_by_trying(dtype):
    found = support(CPU, dtype)
    assert not found.runs and found.why.startswith(f"this CPU cannot compute in {dtype_name(dtype)}")


@pytest.mark.parametrize("name", DTYPES)
def test_every_storage_dtype_can_be_kept_here_though_not_all_compute(name):
    assert stores(CPU, DTYPES[name]) == Support(True, True)
    assert resolve_storage("UNet", name, torch.float16, CPU) == (DTYPES[name], f"UNet: {name}")


def test_a_device_that_does_not_give_back_what_it_keeps_is_found_by_trying():
    found = stores(torch.device("meta"), torch.bfloat16)
    assert not found.runs and found.why.startswith("the device meta cannot keep weights in bf16 (")


def test_storage_that_this_version_does_not_know_stays_as_loaded():
    dtype, said = resolve_storage("UNet", "fp5", torch.float16, CPU)
    assert dtype == torch.float16
    assert "as loaded, because this version of the pack does not know the dtype 'fp5'" in said


def test_a_dtype_without_hardware_runs_and_says_that_it_is_emulated(monkeypatch):
    monkeypatch.setattr(devices, "_is_native", lambda device, dtype: False)
    found = support.__wrapped__(CPU, torch.bfloat16)
    assert found.runs and not found.native and found.why == "this CPU emulates bf16"


@pytest.mark.parametrize(
    ("found", "dtype", "why"),
    [
        (Support(True, True), torch.bfloat16, "hardware"),
        (Support(True, False, "this GPU emulates bf16"), torch.float32, "this GPU emulates bf16"),
        (Support(False, False, "this GPU cannot compute in bf16"), torch.float32, "cannot compute in bf16"),
    ],
)
def test_auto_gives_the_encoder_bf16_where_the_device_has_it(monkeypatch, found, dtype, why):
    monkeypatch.setattr(policy, "support", lambda device, dtype: found)
    chosen = automatic(VAE_ENCODER, CPU, (torch.bfloat16, torch.float32))
    assert chosen.dtype == dtype and why in chosen.why


def test_auto_keeps_to_the_dtypes_that_a_vae_is_known_to_work_in():
    chosen = automatic(VAE_ENCODER, CPU, (torch.float16, torch.float32))
    assert chosen.dtype == torch.float32 and "fp16, fp32, not in bf16" in chosen.why


def test_auto_gives_the_decoder_float32_always():
    for allowed in ((), (torch.bfloat16,), (torch.float16, torch.float32)):
        assert automatic(VAE_DECODER, CPU, allowed).dtype == torch.float32


def test_auto_gives_a_text_encoder_float32_always():
    assert automatic(TEXT_ENCODER, CPU).dtype == torch.float32


@pytest.mark.parametrize(
    ("native", "allowed", "dtype", "why"),
    [
        ({"bf16", "fp16"}, (), torch.bfloat16, "has bf16 in hardware"),
        ({"fp16"}, (), torch.float16, "this GPU emulates bf16; this device has fp16 in hardware"),
        ({"bf16", "fp16"}, (torch.float16, torch.float32), torch.float16, "not known to work in bf16"),
        ({"fp16"}, (torch.bfloat16, torch.float32), torch.float32, "not known to work in fp16"),
        (set(), (), torch.float32, "emulates bf16; this GPU emulates fp16"),
    ],
)
def test_auto_gives_a_diffusion_model_the_half_that_the_device_and_the_model_have(
    monkeypatch, native, allowed, dtype, why
):
    def found(device, asked):
        name = dtype_name(asked)
        return Support(True, True) if name in native else Support(True, False, f"this GPU emulates {name}")

    monkeypatch.setattr(policy, "support", found)
    chosen = automatic(DIFFUSION_MODEL, CPU, allowed)
    assert chosen.dtype == dtype and why in chosen.why


def test_an_unknown_part_is_an_error():
    with pytest.raises(ValueError, match="kind must be"):
        automatic("flux capacitor", CPU)
