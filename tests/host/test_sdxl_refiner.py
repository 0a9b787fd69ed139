"""SDXL's own refiner after fine-tuning: the host takes the file for its SDXLRefiner, and computes what the core does.

The numbers come from tests/host/sdxl_refiner_in_host.py, which runs once in a process of its own (it imports the host).
"""

import pytest

from tests.host.host_process import passed, run_in_host


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    return run_in_host("sdxl_refiner_in_host.py", host_path, tmp_path_factory.mktemp("sdxl_refiner"))


def test_the_sigmas_and_timesteps_are_the_hosts(results):
    found = passed(results, "schedule")
    assert found["hand-over"] == pytest.approx(0.569, abs=5e-4)
    assert found["difference"] == 0 and found["timesteps"]
    assert found["steps"][0] == found["steps"][1] == [199, 174, 149, 124, 99, 74, 49, 24]


def test_the_text_of_sdxl_ends_in_the_columns_that_the_refiner_reads(results):
    found = passed(results, "text")
    assert found["same class"] and found["context"] <= 1e-6 and found["pooled"] <= 1e-6
    assert found["other columns"] > 0.1


@pytest.mark.parametrize("way", ["diffusion model", "checkpoint"])
def test_a_trained_unet_reloads_as_sdxls_refiner_and_gives_the_cores_output(results, way):
    found = passed(results, "reload")
    assert found["steps"] == 2 and found["last layer"] > 1e-4  # it was trained: the last layer began at zero
    assert found[f"{way}: kind"] == ["SDXLRefiner", "SDXLRefiner", "torch.float32"]
    assert found[f"{way}: same names"]  # the host only logs what is missing
    assert found[f"{way}: adm"] == [2, 2560]
    assert found[f"{way}: output"] <= 1e-5 and found[f"{way}: noise"] <= 1e-5
    assert found[f"{way}: turned sizes"] > 1e-4  # the order of the size numbers matters to the output
    assert found[f"{way}: sampled"] <= 1e-5
