"""Model Memory and Training Memory against the host: peaks of real sampling and of a real VAE, and the two nodes."""


import numpy as np
import pytest

from tests.host.checkpoints import MIN
from tests.host.host_process import all_passed, run_in_host
from tests.host.workflows import as_array


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model memory")
    return all_passed(run_in_host("model_memory_in_host.py", host_path, folder))


# ----------------------------------------------------------------------------------------------------- against real


@pytest.mark.parametrize("what", ["sampling", "transformers", "vae"])
def test_never_under_and_at_most_15_percent_over(results, what):
    wrong = []
    for name, said, got in results[what]:
        estimate, measured = sum(said.values()), sum(got.values())
        if not measured <= estimate <= 1.15 * measured:
            wrong.append(f"{name}: {estimate / measured:.3f}")
    assert len(results[what]) >= 4 and wrong == []


def test_each_term_within_20_percent(results):
    wrong = []
    for name, said, got in results["sampling"]:
        for term, measured in got.items():
            if not 0.8 * measured <= said[term] <= 1.2 * measured:
                wrong.append(f"{name}, {term}: {said[term]} of {measured}")
    assert wrong == []


def test_a_control_net_counts(results):
    found = results["control"]
    assert found["measured"] <= found["both"] <= 1.15 * found["measured"]
    assert found["both"] > found["alone"]


def test_tracing_leaves_the_model_alone_and_sees_its_patches(results):
    found = results["untouched"]
    assert found["same"] is True
    assert found["patches"] == [64 * 64 * 4] and "1 weights of MODEL are patched (LoRA)" in found["report"]
    assert "ComfyUI's own figures" in found["report"] and "Not counted:" in found["report"]


def test_what_cannot_be_read_says_so(results):
    found = results["untouched"]
    assert found["refused"].startswith("model: expected a UNet, SD3, Flux or Wan network, got ")
    assert found["control"].startswith("control_net: expected a ControlNet for UNets, got Linear")


def test_what_is_said_to_fit_fits_and_a_bit_more_does_not(results):
    for fits, solved, there, beyond in results["solved"]:
        assert there and not beyond, (fits, solved)
    assert {entry[0] for entry in results["solved"]} == {True, False}


def test_the_largest_size_is_the_same_whatever_was_asked(results):
    for backend, rows in results["consistent"].items():
        said = {tuple(size) for asked, fits, size in rows if not (fits and size == [asked, asked])}
        assert len(said) == 1 and min(said.pop()) > 64, (backend, rows)
        assert {fits for _, fits, _ in rows} == {True, False}


def test_an_estimate_of_sdxl_allocates_less_than_200_mb(results):
    found = results["cost"]
    assert found["weights"] == 2_567_463_684 * 2
    assert max(found["grown"]) < 200 * 10**6
    assert "input_blocks" in found["report"] and "bfloat16" not in found["report"]


# ---------------------------------------------------------------------------------------------------- inside the host


def graph(node, inputs, **more):
    prompt = {"memory": {"class_type": node, "inputs": inputs}, **more}
    prompt["chart"] = {"class_type": "PreviewImage", "inputs": {"images": ["memory", 0]}}
    prompt["report"] = {"class_type": "PreviewAny", "inputs": {"source": ["memory", 1]}}
    prompt["bytes"] = {"class_type": "PreviewAny", "inputs": {"source": ["memory", 2]}}
    return prompt


def shown(result, name):
    return result.outputs[name]["text"][0]


def looks_like_a_chart(host, result):
    (picture,) = host.pictures(result, "chart")
    pixels = as_array(picture)
    return picture.size == (1280, 720) and np.mean(pixels.min(axis=2) > 0.99) > 0.4 and pixels.std() > 0.1


def test_the_model_node_in_a_graph(host):
    asked = {
        "model": ["load", 0], "clip": ["load", 1], "vae": ["load", 2], "size": "custom", "width": 130, "height": 64,
        "batch_size": 2, "frames": 1, "backend": "split", "cfg": True, "text_tokens": 0, "memory_gib": 0.0,
    }  # fmt: skip
    load = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": MIN}}
    result = host.run(graph("Ref2VEstimateModelMemory", asked, load=load)).expect_success()
    report = shown(result, "report")
    assert report.startswith("SD15, 128x64, batch 2, fp32, CFG in one batch\nVerdict: fits with ")
    for words in ("sampling", "VAE decode", "decode in tiles", "VAE encode", "CLIP", "no GPU: ComfyUI runs on the CPU"):
        assert words in report
    assert f"{int(shown(result, 'bytes')):,}" in report
    assert looks_like_a_chart(host, result)
    refused = host.run(graph("Ref2VEstimateModelMemory", {**asked, "width": 7}, load=load))
    assert "width: expected 8 to 131072 pixels" in str(refused.error)


def test_the_training_node_in_a_graph(host):
    asked = {
        "network": "pixel-small", "size": "custom", "width": 32, "height": 32, "batch": 2, "accumulation": 1,
        "precision": "bf16", "optimizer": "AdamW, bf16 Kahan", "ema": True, "checkpointing": True,
        "attention": "pytorch", "layout": "FSDP2", "gpus": 4, "memory_gib": 8.0,
    }  # fmt: skip
    result = host.run(graph("Ref2VEstimateTrainingMemory", asked)).expect_success()
    report = shown(result, "report")
    assert "FSDP2 x 4" in report and "compensation" in report and f"{int(shown(result, 'bytes')):,}" in report
    assert looks_like_a_chart(host, result)
    refused = host.run(graph("Ref2VEstimateTrainingMemory", {**asked, "precision": "fp32"}))
    assert "so expected bf16, got fp32" in str(refused.error)
