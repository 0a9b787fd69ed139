"""SDXL's own refiner after fine-tuning: the host takes the file for its SDXLRefiner, and computes what the core does.

The numbers come from tests/host/sdxl_refiner_in_host.py, which runs once in a process of its own (it imports the host).
"""

import json

import pytest

from tests.core.conftest import write_dataset
from tests.core.test_sdxl_refiner import LATENT, TEXT, TINY
from tests.host.host_process import passed, run_in_host
from tests.host.test_train_refiner import graph, text
from training.objectives.sdxl_refiner.file import load_meta


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    return run_in_host("sdxl_refiner_in_host.py", host_path, tmp_path_factory.mktemp("sdxl_refiner"))


def test_the_sigmas_and_timesteps_are_the_hosts(results):
    found = passed(results, "schedule")
    assert found["hand-over"] == pytest.approx(0.569, abs=5e-4)
    assert all(sigma <= found["hand-over"] for sigma in found["step 20 of 25"])  # what docs/refiner.md says
    assert found["difference"] == 0 and found["timesteps"]
    assert found["steps"][0] == found["steps"][1] == [199, 174, 149, 124, 99, 74, 49, 24]


def test_the_text_of_sdxl_ends_in_the_columns_that_the_refiner_reads(results):
    found = passed(results, "text")
    assert found["same class"] and found["context"] <= 1e-6 and found["pooled"] <= 1e-6
    assert found["other columns"] > 0.1


def test_a_dataset_built_with_the_refiners_own_clip_has_the_text_that_it_needs(results):
    assert passed(results, "captions") == {"shape": [77, 1280, 1280], "same": True}


@pytest.mark.parametrize("way", ["diffusion model", "checkpoint"])
def test_a_trained_unet_reloads_as_sdxls_refiner_and_gives_the_cores_output(results, way):
    found = passed(results, "reload")
    assert found["steps"] == 2 and found["last layer"] > 1e-4  # it was trained: the last layer began at zero
    assert found[f"{way}: kind"] == ["SDXLRefiner", "SDXLRefiner", "torch.float32"]
    # what Base from Model would write into a dataset is what the objective asks for
    assert found[f"{way}: latent"] == [LATENT["name"], LATENT["channels"], LATENT["scale"], LATENT["shift"]]
    assert found[f"{way}: same names"]  # the host only logs what is missing
    assert found[f"{way}: adm"] == [2, 2560]
    assert found[f"{way}: output"] <= 1e-5 and found[f"{way}: noise"] <= 1e-5
    assert found[f"{way}: turned sizes"] > 1e-4  # the order of the size numbers matters to the output
    assert found[f"{way}: sampled"] <= 1e-5


# ---- the node -------------------------------------------------------------------------------------------------------


def test_the_node_trains_it_through_its_options_and_reads_a_start_from_the_hosts_folders(host):
    data = write_dataset(host.base / "output" / "refiner_datasets" / "sdxl", pairs=3, side=8, latent=LATENT, text=TEXT)
    options = {"objective": "sdxl_refiner", "refiner": {"shape": TINY}, "validation": {"pictures": 0}}
    first = host.run(graph(data, "sdxl first", options=options, epochs=1)).expect_success()
    said = text(first, "report")
    assert "predicts the noise at timesteps 0 to 199" in said and "| base |" in said
    refiner = host.base / "output" / "refiners" / "sdxl first" / "refiner.safetensors"
    assert load_meta(refiner).training["steps"] == 1

    options["refiner"]["start_from"] = "refiners/sdxl first/refiner.safetensors"
    second = host.run(graph(data, "sdxl second", options=options, epochs=1)).expect_success()
    assert "starts from refiner.safetensors" in text(second, "report")

    kept = json.loads((host.base / "output" / "refiners" / "sdxl second" / "config.json").read_text())
    assert kept["config"]["refiner"]["start_from"] == str(refiner.resolve())
    options["refiner"]["start_from"] = "/etc/hostname"
    refused = host.run(graph(data, "sdxl third", options=options, epochs=1))
    assert "refiner.start_from must lie inside ComfyUI's input, output" in refused.error.message

    loaded = host.run(
        {
            "load": {
                "class_type": "Ref2VLoadRefiner",
                "inputs": {"refiner": "sdxl first/refiner.safetensors", "strength": 1.0},
            },
            "show": {"class_type": "PreviewAny", "inputs": {"source": ["load", 0]}},
        }
    )
    assert "got SDXL's own refiner, fine-tuned" in loaded.error.message
