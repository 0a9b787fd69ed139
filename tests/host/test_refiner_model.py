"""A refiner file as a MODEL of the real host: the same network, the same sampling, a sentence for what does not fit.

The numbers come from tests/host/refiner_in_host.py, which runs once in a process of its own (it imports the host).
"""


import pytest

from tests.host.host_process import run_in_host


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    return run_in_host("refiner_in_host.py", host_path, tmp_path_factory.mktemp("refiner"))


@pytest.fixture
def check(results, request):
    """The results of the check that the test is named after: test_NAME or test_NAME_and_more."""
    name = next(name for name in results if request.node.originalname.startswith(f"test_{name}"))
    if "failed" in results[name]:
        pytest.fail(results[name]["failed"])
    return results[name]


def test_unet_equality_from_the_same_file(check):
    assert len(check) >= 18
    assert {name: e for name, e in check.items() if not e <= 1e-5} == {}


def test_ksampler_equals_the_cores_sampler(check):
    errors = {name: e for name, e in check.items() if not name.endswith("changed")}
    assert {name: e for name, e in errors.items() if not e <= 1e-4} == {}
    assert all(e > 0.01 for name, e in check.items() if name.endswith("changed"))  # it did refine something


def test_text_conditioning_guides(check):
    assert check["text changes"] > 1e-3
    assert check["cfg 3"] <= 1e-4
    assert check["no pooled text"] <= 1e-4


def test_split_of_4_and_4_steps_equals_8_steps(check):
    changed = {name: e for name, e in check.items() if name.endswith("changed")}
    assert all(e > 0.01 for e in changed.values())
    assert {name: e for name, e in check.items() if name not in changed and not e <= 1e-5} == {}


def test_sigmas_of_the_run_equal_8_simple_steps(check):
    assert check["sigmas"] == [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0]
    assert check["dtype"] == "torch.float32"
    assert check["simple"] == 0.0
    assert check["samples"] <= 1e-6
    assert check["other model"].startswith("This needs the MODEL of Load Refiner")


def test_strength_is_monotone_and_exact_at_both_ends(check):
    distances = check["distances"]
    assert distances == sorted(distances, reverse=True) and len(set(distances)) == len(distances)
    assert distances[2] == pytest.approx(0.6 * distances[0], rel=1e-4)
    assert check["0 is the base"] and check["1 is untouched"]
    assert "between 0" in check["below 0"]


def test_clones_sample_alike(check):
    assert check["equal"]


def test_one_frame_of_a_video_latent_is_a_picture(check):
    assert check.pop("shape") == [2, 4, 1, 13, 18]
    assert check.pop("split") <= 1e-5
    assert all(check.values()), check


def test_two_strengths_of_one_file_are_one_network(check):
    assert len(check) == 8 and all(check.values()), check


def test_cancel_while_it_is_sent_is_found_by_the_next_look(check):
    assert check == {"goes on until it looks": True, "then it ends as the host does": True}


def test_mask_keeps_the_base_outside(check):
    assert check["outside"] <= 1e-6
    assert check["inside"] > 0.01


def test_latent_format_of_the_file(check):
    assert check.pop("memory") == pytest.approx(0.1)
    assert check.pop("dtype") == "torch.float32"
    assert check.pop("in") <= 1e-6
    assert check.pop("out") <= 1e-6
    assert all(check.values()), check


def test_lora_of_a_run_works_in_the_hosts_own_loader(check):
    for name, found in check.items():
        if name.endswith("patched"):
            assert found[0] == found[1] > 10, name
        else:
            assert found > 1e-3 if name.endswith("changed") else found <= 1e-5, (name, found)


REFUSALS = {
    "channels": "4 channels",
    "PerpNeg": "PerpNeg does not fit a refiner",
    "SAG": "Self-Attention Guidance does not fit a refiner",
    "video latent": "[batch, 4, height, width]",
    "empty latent": "connect the base's LATENT",
    "empty base": "connect the base's LATENT",
    "denoise": "set denoise to 1",
    "denoise with base": "set denoise to 1",
    "split without base": "Refiner Conditioning",
    "split with noise": "turn add_noise off",
    "split with mask": "noise mask",
    "base batch": "batch of 3",
    "base size": "24 x 16",
    "base channels": "[2, 3, 16, 16]",
    "two bases": "different base latents",
    "text width": "40 wide",
    "no text": "got none",
    "pooled width": "20 wide",
    "controlnet": "ControlNet",
    "foreign sigmas": "14.6",
    "rising sigmas": "must fall",
    "model sampling": "model sampling",
    "one shot": "set steps to 1",
    "nan latent": "the VAE encoder or the sampler before it",
    "nan network": "UNet gives NaN or infinity, first in layer input_blocks.1.0.in_layers.2, computing in float32",
    "uni_pc, one step": "needs at least 2 steps",
    "dpm_fast, one step": "needs at least 2 steps",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_are_one_sentence(results, case):
    said = results["refusals"][case]
    assert REFUSALS[case] in said
    assert not said.startswith("NOT A SENTENCE") and "\n" not in said


@pytest.mark.parametrize("case", ["one shot, one step", "one base, batch", "uni_pc, two steps"])
def test_what_fits_is_not_refused(results, case):
    assert results["refusals"][case] == "PASSED"


FILES = {
    "truncated": "truncated",
    "nothing": "damaged",
    "pickle": "pickle",
    "other": "another model",
    "less": "1 missing",
    "more": "1 too many",
    "shape": "1 differ; the first, conv_in.weight, is [32, 8, 1, 1] instead of [32, 8, 3, 3]",
    "absent": "absent.safetensors",
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_refiner_are_named(results, case):
    said = results["files"][case]
    assert f"{case}.safetensors" in said and FILES[case] in said
    assert not said.startswith("NOT A SENTENCE") and "\n" not in said
