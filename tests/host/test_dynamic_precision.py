"""Precision nodes on models under the newest host's dynamic VRAM.

Reads the results of tests/host/dynamic_precision_in_host.py. The patchers are stand-ins, since that host cannot be had
(tests/host/newest_host says what is real); so nothing here has run on the newest host itself.
"""

import pytest

from tests.host.host_process import run_in_host


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    return run_in_host("dynamic_precision_in_host.py", host_path, tmp_path_factory.mktemp("dynamic precision"))


def test_model_computes_and_is_kept(check):
    assert check["loaded"] == ["bfloat16", "float32"]  # what the loader chose, over a file of FP32
    assert check["fed"] == {  # norms are kept in FP32
        "fp32": [["float32"], ["float32"]], "fp16": [["float32"], ["float16"]], "bf16": [["float32"], ["bfloat16"]],
    }  # fmt: skip
    errors = check["error"]
    assert errors["fp32"] == 0 < errors["fp16"] < errors["bf16"] < 0.05
    dtype, patcher, lost = check["stored"]
    assert (dtype, patcher) == ("float8_e4m3fn", "PlainPatcher") and 1e-3 < lost < 0.5
    assert "Storage: fp8_e4m3fn (norms and biases stay bf16)" in check["report"]
    dtype, lost = check["no way to read again"]
    assert dtype == "float16" and 0 < lost < 0.05
    assert check["lora moves along"] < 0.1 and check["restored with a LoRA of later"] == [True, True]
    assert check["default gives the source"] and check["again"] and check["the file's memory is as it was"]


def test_a_storage_that_cannot_be_had_is_passed_over(check):
    """Said in the report, and the rest of what was asked for is done."""
    assert "Storage: bf16, as loaded; fp16 is passed over, because a copy of it out of dynamic VRAM" in check["report"]
    assert check["computes"] == ["float32"] and check["source's model"]
    assert "Storage: fp16\n" in check["file gone"] and "rounded by the loader" not in check["file gone"]


def test_a_copy_is_a_model_of_its_own(check):
    assert check["plain"] == ["PlainPatcher", False]
    assert check["a uuid of its own"] and check["buffers of its own"] and check["no clones of the other model"]
    assert check["for another GPU"] == ["float16", True, "float32", True]
    assert check["back"] == [True] and check["compute follows"] == ["float16"]


def test_copies_go_when_nobody_uses_them(check):
    assert check == {"copy": True, "source": True}


def test_clip_computes_and_is_kept(check):
    assert check["dynamic"] and 1e-4 < check["compute"] < check["storage"] < 0.5
    assert check["kept"] == ["float8_e5m2"] and "clip_g storage: fp8_e5m2" in check["report"]
    assert check["no way to read again"] < 0.05 and check["default gives the source"] and check["again"]


def test_vae_halves_come_from_the_file(check):
    assert check["dynamic"] == [True, False, False]
    assert check["loader"] > 1e-3  # its BF16
    assert check["decoder"] and check["encoder"] > 1e-4 and "rounded" not in check["report"]
    assert check["default gives the source"] and check["load, default"] == pytest.approx(check["loader"], rel=0.5)
    assert check["one file, one model"] and check["again"] and check["the file's memory is as it was"]


def test_guard_audit_and_plan(check):
    assert check["mended"] and check["sampled"]
    assert "Its weights are the file's own, in fp32" in check["audit"] and "MODEL at sigma" in check["audit"]
    assert check["planned"] == ["bfloat16", "bfloat16"] and "CLIP clip_l" in check["table"]


def test_a_cancel_is_never_swallowed(check):
    assert check == {"is an Exception": False, "reload": "cancelled", "guard": "cancelled"}
