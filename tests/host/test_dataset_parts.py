"""VAE, text encoder, base MODEL and checkpoint as the dataset builder handles them, on the real host's objects.

The numbers come from tests/host/dataset_in_host.py, which runs once in a process of its own (it imports the host).
"""


import pytest

from tests.host.checkpoints import BROKEN, BROKEN_UNET, MIN, make_checkpoints
from tests.host.conftest import STATE
from tests.host.host_process import run_in_host


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset parts")
    made = make_checkpoints(host_path, folder / "checkpoints", cache=STATE / "checkpoints")
    return run_in_host("dataset_in_host.py", host_path, folder, str(made[0].parent))


def test_vae_overflow_is_encoded_in_float32(check):
    assert not check["host alone is finite"], "the test's VAE must overflow, or it shows nothing"
    assert check["error against float32"] < 1e-4
    assert check["retried"] == ["fox.png"]
    assert check["vae unchanged"]


def test_vae_that_overflows_nowhere_is_left_alone(check):
    assert check == {"equal": True, "retried": [], "copied": False}


def test_vae_with_nan_names_file_and_layer(check):
    assert "fox.png" in check["said"] and "taesd_encoder.4.conv.2" in check["said"]
    assert check["vae unchanged"]


def test_vae_fingerprint_sees_weights_and_dtype(check):
    assert all(check.values()), check


def test_model_fingerprint_sees_patches_but_not_loading(check):
    assert check.pop("parameters") > 1e6
    assert all(check.values()), check


def test_latent_formats_are_read_and_checked(check):
    assert check["SD15"] == ["SD15", 4, 0.18215, 0.0]
    assert check["Flux"] == ["Flux", 16, 0.3611, 0.1159]
    assert check["ChromaRadiance"] == ["ChromaRadiance", 3, 1.0, 0.0]
    assert len(check["Wan21"][2]) == len(check["Wan21"][3]) == 16
    refused = {name: said for name, said in check.items() if isinstance(said, str)}
    assert list(refused) == ["HunyuanImage21Refiner"] and "HunyuanImage21Refiner" in refused["HunyuanImage21Refiner"]


def test_base_latent_equals_the_ksamplers(check):
    assert check["error"] == 0.0
    assert check["another seed"] > 0.01 and check["changed"] > 0.01


def test_contexts_have_one_length_and_repeating_changes_nothing(check):
    assert check["short only"] == {"tokens": 77, "dim": 768, "pooled": 0}
    assert check["mixed"] == {"tokens": 154, "dim": 768, "pooled": 0}
    assert check["cut"] == [1500]
    assert check["shapes"] == [[1, 77, 768], [1, 154, 768]]
    assert check["the UNet's answer"] < 1e-5


def test_missing_keys_are_named(check):
    passed = {name for name, said in check.items() if said == "PASSED"}
    whole = {f"{MIN} model", f"{MIN} clip", f"{MIN} text encoder"}
    assert passed == whole | {
        f"{BROKEN} model",
        f"{BROKEN_UNET} clip",
        f"{BROKEN_UNET} text encoder",
        "nonsense",  # the host refuses to load it long before
    }
    assert BROKEN in check[f"{BROKEN} clip"] and "text encoder clip_l" in check[f"{BROKEN} clip"]
    assert "lacks 16 of the weights" in check[f"{BROKEN} clip"]
    assert check[f"{BROKEN} text encoder"] == check[f"{BROKEN} clip"]
    assert check["safetensors"] == check[f"{BROKEN} clip"].replace(BROKEN, "broken.safetensors")
    assert "UNet (input_blocks.1.1.transformer_blocks.0.attn1.to_k.weight)" in check[f"{BROKEN_UNET} model"]


def test_vae_dtype_is_part_of_the_recipe(check):
    (first, said), (second, again), (third, other) = check
    assert (said, again, other) == ("Built", "Reused", "Built")
    assert first == second != third


def test_precision_of_an_encoder_is_part_of_the_recipe(check):
    """Also of one that is shared with its source. The decoder's is not: no latent depends on it."""
    folders, said, dtypes = zip(*check.values(), strict=True)
    assert said == ("Built", "Built", "Reused", "Built", "Reused")
    assert len(set(folders)) == 3 and folders[0] == folders[2] and folders[1] == folders[4]
    assert dtypes == ("float32", "bfloat16", "float32", "float32", "bfloat16")


def test_refused_vaes_get_one_sentence(check):
    assert check == {
        "TAEHV of Wan 2.2": "The VAE (TAEHV) only decodes: a dataset needs one that encodes.",
        "Hunyuan3D (ShapeVAE)": (
            "The VAE (ShapeVAE) is one of shapes in space; a dataset of pictures needs one of pictures."
        ),
        "Stable Audio (Oobleck)": (
            "The VAE (AudioOobleckVAE) is one of sound; a dataset of pictures needs one of pictures."
        ),
        "another family": (
            "The VAE gives 3 channels (image00000), the base model takes 4 (SD15): give the VAE that belongs to the "
            "base model."
        ),
        "no caption": "The input 'caption' is wired but nothing comes in, at least for a part of its list.",
        "no folder": "The input 'folder' is wired but nothing comes in.",
        "weights of another shape": check["weights of another shape"],
    }
    assert check["weights of another shape"].startswith(
        "The VAE (TAESD) cannot encode the picture image00000 of 64x64 (RuntimeError: "
    )


def test_running_out_of_memory_is_said_and_its_latents_are_not_kept(check):
    """Of the second picture, target and base: two latents. Only what is kept is counted as encoded."""
    said = "Encoded in tiles, since memory ran out; their latents are not quite the same (2): image00001"
    assert said in check["tiled"] and said in check["report.txt"]
    assert "Latents: 2 encoded, 0 found" in check["tiled"]
    assert "in tiles" not in check["whole"] and "Latents: 2 encoded, 2 found" in check["whole"]


def test_base_model_and_vae_take_few_turns(check):
    """A look at six pairs, then the nine of the build: each is one turn of the VAE and one of the base model."""
    assert check["turns"] == ["VAE", "model"] * 2
    assert check["samples"] == 6 + 9
    assert "Base latents: " not in check["report"]  # such a model's samples are not kept: nobody knows what is on it


def test_what_was_sampled_is_found_again(check):
    sampled = {name: said["sampled"] for name, said in check.items() if name != "known"}
    assert sampled["first"] == ["Base latents: 3 sampled, 0 found in the latent cache."]
    assert sampled["again"] == ["Base latents: 0 sampled, 3 found in the latent cache."]
    assert sampled["one more picture"] == ["Base latents: 1 sampled, 3 found in the latent cache."]
    assert sampled["another seed"] == sampled["another text"] == sampled["first"]
    assert sampled["a patched model"] == []
    # What another node has put on a model is not known, what our selector has is: only the former is never found again.
    plain, selected, switched, stopping, rerunning, patched = check["known"]
    for once, again in (plain, selected, switched, stopping, rerunning):
        assert once == again and once[2]
    assert len({base[0][0] for base in (plain, selected, switched, rerunning)}) == 4 and stopping == selected
    assert patched[0][1] != patched[1][1] and not patched[0][2]
    assert check["first"]["files"] and check["again"]["files"] == check["first"]["files"]
    assert check["again"]["hash"] == check["first"]["hash"] != check["another seed"]["hash"]
