"""The nodes on quantized, GGUF-like and ordinary weights under the newest host's dynamic VRAM.

Reads the results of tests/host/newest_in_host.py. That host cannot be had, so its patchers are stand-ins over real
models (tests/host/newest_host says what is real): nothing here has run on the newest host itself.
"""

import pytest

from tests.host.host_process import passed, run_in_host


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    return run_in_host("newest_in_host.py", host_path, tmp_path_factory.mktemp("newest"))


@pytest.mark.parametrize("kind", ["quantized", "blocks"])
def test_packed_weights_compute_in_any_dtype_and_pass_a_storage_over(results, kind):
    """Each as asked, measured in the layers; the choice that cannot be had is said, and nothing fails."""
    check = passed(results, kind)
    assert check["fed"] == {  # norms, then the others
        "bf16": [["float32"], ["bfloat16"]], "fp16": [["float32"], ["float16"]], "fp32": [["float32"], ["float32"]],
    }  # fmt: skip
    errors = check["error"]
    assert errors["fp32"] == 0 < errors["fp16"] < errors["bf16"] < 0.05
    assert "Storage: quantized, as loaded; fp16 is passed over, because" in check["report"]
    assert "Compute: bf16" in check["report"] and check["stored computes in"] == ["bfloat16"]
    assert check["source's own weights"] and check["still packed"] and check["again"]
    assert check["default gives the source"]


def test_a_lora_goes_along_with_quantized_weights(results):
    assert passed(results, "quantized")["lora"] < 0.1


@pytest.mark.parametrize("kind", ["quantized", "blocks"])
def test_packed_weights_have_a_fingerprint_that_changes_with_their_numbers_or_one_sentence(results, kind):
    check = passed(results, kind)
    assert not check["fingerprint"].startswith("NOT A SENTENCE"), check["fingerprint"]
    if check["fingerprint"] == "PASSED":
        assert check["fingerprints"] == [True, True]  # the same again; others for other numbers


def test_a_plan_changes_the_vae_beside_a_model_that_it_cannot_store_otherwise(results):
    check = passed(results, "plan_with_a_quantized_model_beside_an_ordinary_vae")
    assert (check["encoder"], check["decoder"], check["model"]) == (["bfloat16"], ["float32"], ["bfloat16"])
    rows = {line.split("|")[1].strip(): line for line in check["table"].splitlines() if line.startswith("|")}
    assert "quantized" in rows["MODEL"] and "fp16 passed over" in rows["MODEL"]
    assert "fp16 is passed over, because its weights are quantized" in check["table"]
    assert "bf16" in rows["VAE encoder"] and "fp32" in rows["VAE decoder"]
    assert "already rounded" not in check["table"]  # of weights that are the file's own


def test_one_text_encoder_of_two_is_computed_or_kept_otherwise(results):
    check = passed(results, "clip_in_its_layers")
    assert check["dynamic"]
    changed, other, kept, error = check["compute"]
    assert (changed, other, kept) == (["bfloat16"], ["float32"], ["float16"]) and 1e-4 < error < 0.05
    changed, other, kept, error = check["storage"]
    # the file's numbers are such that BF16 holds them
    assert (changed, other, kept) == (["float32"], ["float32"], ["bfloat16"]) and error == 0
    assert check["for another GPU"] == ["bfloat16"]
    fed, error, report = check["quantized"]
    assert fed == ["bfloat16"] and 1e-4 < error < 0.05
    assert "clip_g storage: quantized, as loaded; bf16 is passed over" in report and "clip_g compute: bf16" in report


def test_a_vae_with_layers_that_are_not_the_hosts_runs_in_two_dtypes(results):
    check = passed(results, "vae_in_its_layers")
    assert check["dynamic"] == [True, False] and check["fed"] == [["bfloat16"], ["float32"]]
    encoder, decoder = check["error"]
    assert 1e-4 < encoder < 0.1 and decoder == 0
    assert "passed over" not in check["report"] and "rounded" not in check["report"]
    assert check["source untouched"] and check["again"]


def test_a_guard_names_the_layer_and_goes_on_in_fp32(results):
    check = passed(results, "guarded_model")
    assert not check["without"] and check["mended"]
    assert "first in layer input_blocks.1.0.in_layers.2" in check["stopped"]
    assert 0 < check["fine"] < 0.05 and check["again"]


def test_the_audit_measures_a_clip_and_leaves_it(results):
    check = passed(results, "audited_clip")
    assert "CLIP clip_g: computed in bf16: relative error" in check["report"]
    assert "CLIP clip_l: stored in bf16: relative error" in check["report"] and check["again"]


def test_a_refiner_is_dynamic_and_follows_the_selectors_on_further_gpus_too(results):
    check = passed(results, "refiner")
    assert check["dynamic"] == [True, False, False] and check["finite"] and check["again"]
    assert check["fed"] == [["float32"], ["bfloat16"], ["bfloat16"]] and check["kept"] == ["bfloat16"]
    assert all(1e-4 < error < 0.05 for error in check["error"])


def test_model_memory_counts_the_same_loaded_or_not(results):
    """Bytes of the dtypes that the loader chose, of weights that lie in memory in the file's."""
    check = passed(results, "memory")
    assert check["drawn"] and check["fresh"] == check["loaded"] and min(check["fresh"]) > 0
    assert check["bf16"][1] == check["fresh"][1]  # the loader had chosen BF16 already
