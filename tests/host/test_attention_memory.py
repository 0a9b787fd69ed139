"""Attention Memory against the host itself: its functions' allocations, its networks, its graph."""


import numpy as np
import pytest

from tests.host.checkpoints import MIN
from tests.host.host_process import all_passed, run_in_host
from tests.host.workflows import as_array
from training.memory.estimate import estimate_attention
from training.memory.machine import planned_machine
from training.memory.models import PRESETS

NODE = "Ref2VEstimateAttentionMemory"


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("attention")
    return all_passed(run_in_host("attention_in_host.py", host_path, folder))


# --------------------------------------------------------------------------------------------- functions and networks


@pytest.mark.parametrize("backend", ["basic", "split", "sub-quadratic", "pytorch", "pytorch math"])
def test_closed_form_is_the_allocation_peak_of_the_hosts_own_function(results, backend):
    """Never under and at most 15 % over is what is asked; to the byte is what comes out."""
    measured = [(call, said, got) for name, call, said, got in results["peaks"] if name == backend]
    assert len(measured) >= 36
    sizes = [entry for entry in measured if not isinstance(entry[1], dict)]
    assert [entry for entry in sizes if entry[1] != entry[2]] == []


def test_split_refuses_where_the_host_refuses(results):
    refused = [(said, got) for _, _, said, got in results["peaks"] if isinstance(said, dict) or isinstance(got, dict)]
    assert all(isinstance(said, dict) and "Not enough memory" in got["refused"] for said, got in refused)


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_are_what_is_read_from_the_hosts_own_network(results, name):
    read, preset = results["presets"][name]
    assert read == preset


def test_a_real_forward_calls_attention_as_often_and_as_large_as_predicted(results):
    called, predicted = results["sequence"]
    assert len(called) == 24 and called == predicted


def test_a_network_that_cannot_be_read_is_one_sentence(results):
    assert results["unreadable"].startswith("model: expected a UNet, SD3, Flux or Wan network")


# ---------------------------------------------------------------------------------------------------------- the graph


def graph(model=False, **inputs):
    asked = {
        "preset": "SDXL", "size": "custom", "width": 1366, "height": 768, "batch_size": 1, "frames": 1, "dtype": "bf16",
        "backend": "basic", "cfg": True, "text_tokens": 0, "memory_gib": 8.0,
    } | inputs  # fmt: skip
    prompt = {
        "memory": {"class_type": NODE, "inputs": asked},
        "chart": {"class_type": "PreviewImage", "inputs": {"images": ["memory", 0]}},
    }
    for index, name in enumerate(("report", "attention_bytes", "latent_bytes", "tokens", "width", "height"), start=1):
        prompt[name] = {"class_type": "PreviewAny", "inputs": {"source": ["memory", index]}}
    if model:
        prompt["load"] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": MIN}}
        asked["model"] = ["load", 0]
    return prompt


def shown(result, node):
    return result.outputs[node]["text"][0]


def test_the_node_gives_the_report_the_numbers_and_a_chart(host):
    result = host.run(graph()).expect_success()
    answer = estimate_attention(PRESETS["SDXL"], 1366, 768, planned_machine(8), backend="basic")
    assert shown(result, "report") == answer.report()
    numbers = [int(shown(result, name)) for name in ("attention_bytes", "latent_bytes", "tokens", "width", "height")]
    assert numbers == [answer.attention.total, 130_560, 85 * 48, 1360, 768]
    assert result.outputs["memory"]["text"] and result.outputs["memory"]["images"]
    (picture,) = host.pictures(result, "chart")
    assert picture.size == (1280, 720)
    pixels = as_array(picture)
    assert np.mean(pixels.min(axis=2) > 0.99) > 0.4 and pixels.std() > 0.1  # bars on white


def test_a_connected_model_is_read_and_auto_is_what_this_host_uses(host):
    result = host.run(graph(model=True, size="768x768", dtype="auto", backend="auto", memory_gib=0.0)).expect_success()
    report = shown(result, "report")
    assert report.startswith("SD15, 768x768, batch 1, fp32")
    assert "Backend: sub-quadratic (auto), measured on the CPU." in report  # a host on the CPU
    assert "no GPU: ComfyUI runs on the CPU here" in report
    assert "self, full" in report and "9216" in report


def test_fitting_size_goes_into_the_graph(host):
    prompt = graph(preset="SD1.5", width=2048, height=1152, backend="pytorch math", memory_gib=6.0)
    prompt["latent"] = {
        "class_type": "EmptyLatentImage",
        "inputs": {"width": ["memory", 5], "height": ["memory", 6], "batch_size": 1},
    }
    prompt["shape"] = {"class_type": "SaveLatent", "inputs": {"samples": ["latent", 0], "filename_prefix": "fitting"}}
    result = host.run(prompt).expect_success()
    width, height = (int(shown(result, name)) for name in ("width", "height"))
    assert 512 < width < 2048 and width / height == pytest.approx(16 / 9, abs=0.02)
    assert f"does not fit; {width}x{height} is the largest 16:9 that does" in shown(result, "report")


def test_where_nothing_fits_no_size_goes_into_the_graph(host):
    prompt = graph(preset="SDXL", width=1024, height=1024, memory_gib=0.001)
    prompt["latent"] = {
        "class_type": "EmptyLatentImage",
        "inputs": {"width": ["memory", 5], "height": ["memory", 6], "batch_size": 1},
    }
    prompt["shape"] = {"class_type": "SaveLatent", "inputs": {"samples": ["latent", 0], "filename_prefix": "nothing"}}
    said = [data["exception_message"] for kind, data in host.run(prompt).events if kind == "execution_error"]
    assert said and all("There is no number to give here: nothing of the kind fits" in line for line in said)


@pytest.mark.parametrize("side, size", [("width", 7), ("height", 1)])
def test_a_size_that_no_latent_has_is_one_sentence_in_the_node(host, side, size):
    result = host.run(graph(**{side: size}))
    assert f"{side}: expected 8 to 131072 pixels" in str(result.error)


def test_the_host_refuses_zero_by_itself(host):
    result = host.run(graph(width=0))
    assert result.status == "refused" and "width" in str(result.error)
