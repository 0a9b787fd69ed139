"""Train Refiner in the graph of the real host: train, reuse, resume, stop, start over, refuse."""

import hashlib
import io
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from tests.host.server import PACK
from training.data.shards import DatasetWriter
from training.objectives.residual.file import load_meta
from training.objectives.residual.lora import load_lora_meta
from training.run.checkpoints.checkpoint import load_newest

SHAPE = {
    "block_channels": [32, 32], "layers_per_block": 1, "transformer_depth": [0, 0], "middle_depth": 0, "heads": [1, 1],
    "context_dim": 8,
}  # fmt: skip
OPTIONS = {"refiner": {"shape": SHAPE}, "validation": {"pictures": 1, "crop": 16, "every": "epoch"}}


def write_dataset(folder, seed=0, pairs=8):
    """Checkerboards that the base has blurred, in pixel space; the last pair is held out."""
    generator = torch.Generator().manual_seed(seed)
    latent = {"name": "ChromaRadiance", "channels": 3, "scale": 1.0, "shift": 0.0, "downscale": 1}
    with DatasetWriter(folder, latent=latent, vae=None, base={"kind": "degradation"}) as writer:
        for i in range(pairs):
            z = torch.rand(3, 8, 8, generator=generator).repeat_interleave(3, 1).repeat_interleave(3, 2) * 2 - 1
            b = torch.nn.functional.avg_pool2d(z[None], 3, 1, 1)[0]
            split = "held_out" if i == pairs - 1 else "train"
            writer.add(z, b, source=f"{i}.png", sha256=f"{i:064x}", group=str(i), split=split)
    return folder


@pytest.fixture(scope="module")
def dataset(host):
    return write_dataset(host.base / "output" / "refiner_datasets" / "test_train")


def graph(dataset, run_name, *, options=None, **inputs):
    """Train Refiner, its report and loss curve shown."""
    inputs = {
        "dataset": str(dataset), "run_name": run_name, "preset": "auto", "epochs": 2, "batch_size": 2,
        "learning_rate": 1e-3, "crop": 0, "precision": "fp32", "seed": 3, "if_run_exists": "reuse or resume",
        "options": json.dumps(OPTIONS if options is None else options),
    } | inputs  # fmt: skip
    return {
        "train": {"class_type": "Ref2VTrainRefiner", "inputs": inputs},
        "report": {"class_type": "PreviewAny", "inputs": {"source": ["train", 1]}},
        "path": {"class_type": "PreviewAny", "inputs": {"source": ["train", 0]}},
        "loss": {"class_type": "PreviewImage", "inputs": {"images": ["train", 2]}},
    }


def text(result, node):
    (said,) = result.outputs[node]["text"]
    return said


def test_trains_shows_and_hands_on_a_refiner(host, dataset):
    result = host.run(graph(dataset, "test_train a")).expect_success()
    refiner = host.base / "output" / "refiners" / "test_train a" / "refiner.safetensors"
    assert text(result, "path") == str(refiner)
    assert load_meta(refiner).noise_scale > 0
    report = text(result, "report")
    assert report.count("Trained 8 steps (2 epochs)") == 1 and "Loss at each sigma" in report
    assert "| PSNR (dB, more is better) |" in report and "\n| best fixed sharpening filter |" in report
    assert ("train", "Measured 1 of 1 pairs") in result.texts
    curve = host.pictures(result, "loss")[0]
    assert curve.width > 300
    steps = [value for node, value, total in result.progress if node == "train" and total == 8]
    assert steps and steps[-1] == 8 and steps == sorted(steps)
    previews = [Image.open(io.BytesIO(image)).size for node, image in result.previews if node == "train"]
    assert len(set(previews)) >= 2  # loss curve and validation sample in turn


def test_a_finished_run_is_reused_and_says_so_and_a_deleted_file_trains_again(host, dataset):
    prompt = graph(dataset, "test_train b")
    host.run(prompt).expect_success()
    folder = host.base / "output" / "refiners" / "test_train b"
    whole = (folder / "refiner.safetensors").read_bytes()
    stamp = (folder / "refiner.safetensors").stat().st_mtime_ns

    again = host.run(prompt).expect_success()
    assert text(again, "report").count("reused") == 1
    assert (folder / "refiner.safetensors").stat().st_mtime_ns == stamp
    assert "train" in host.run(prompt).expect_success().cached

    (folder / "refiner.safetensors").unlink()
    result = host.run(prompt).expect_success()
    assert "train" in result.ran and "Trained 8 steps" in text(result, "report")
    assert (folder / "refiner.safetensors").read_bytes() == whole  # from the start, not on from trained weights


def test_another_configuration_under_the_name_is_refused_and_start_over_keeps_the_old_run(host, dataset):
    folder = host.base / "output" / "refiners" / "test_train c"
    host.run(graph(dataset, "test_train c")).expect_success()
    whole = (folder / "refiner.safetensors").read_bytes()
    refused = host.run(graph(dataset, "test_train c", epochs=3, seed=4))
    assert "epochs 2 -> 3" in refused.error.message and "seed 3 -> 4" in refused.error.message

    over = {"epochs": 3, "if_run_exists": "start over"}
    wrong = {"refiner": {"shape": {**SHAPE, "latent_channels": 5}}}  # noticed late, with the dataset open
    broken = host.run(graph(dataset, "test_train c", **over, options=wrong))
    assert "latent_channels" in broken.error.message
    assert (folder / "refiner.safetensors").read_bytes() == whole and not list(folder.parent.glob("test_train c.*"))

    result = host.run(graph(dataset, "test_train c", **over)).expect_success()
    assert "Trained 12 steps" in text(result, "report") and "kept as test_train c.previous-1" in text(result, "report")
    assert (folder.with_name("test_train c.previous-1") / "refiner.safetensors").read_bytes() == whole
    # queued again, with the same switch: the same run would give the same bytes
    assert "reused" in text(host.run(graph(dataset, "test_train c", **over)).expect_success(), "report")
    assert len(list(folder.parent.glob("test_train c*"))) == 2


def test_interrupt_stops_within_a_step_and_the_run_goes_on_to_the_same_bytes(host, dataset):
    unwatched = {"epochs": 25, "options": {**OPTIONS, "validation": {"pictures": 0, "crop": 16}}}
    host.run(graph(dataset, "test_train d whole", **unwatched)).expect_success()
    prompt = graph(dataset, "test_train d", **unwatched)
    pressed = []

    def press(kind, data):
        if kind == "progress" and data["value"] >= 20 and not pressed:
            pressed.append(time.perf_counter())
            host.interrupt()

    result = host.run(prompt, on_event=press)
    assert result.status == "interrupted"
    assert time.perf_counter() - pressed[0] < 5
    folder = host.base / "output" / "refiners" / "test_train d"
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "stopped" and status["step"] < status["total"]
    found, passed_over = load_newest(folder / ".checkpoints")
    assert found.step == status["step"] and not passed_over
    assert not (folder / "refiner.safetensors").exists()

    assert "Resumed at step" in text(host.run(prompt).expect_success(), "report")
    expected = host.base / "output" / "refiners" / "test_train d whole" / "refiner.safetensors"
    assert (folder / "refiner.safetensors").read_bytes() == expected.read_bytes()


def test_the_node_and_the_command_line_give_the_same_bytes(host, dataset, tmp_path):
    host.run(graph(dataset, "test_train e")).expect_success()
    folder = host.base / "output" / "refiners" / "test_train e"
    command = [sys.executable, "-m", "training", "train", "--config", str(folder / "config.json")]
    subprocess.run([*command, "--run", str(tmp_path / "run")], cwd=PACK, check=True, capture_output=True, timeout=300)
    assert (tmp_path / "run" / "refiner.safetensors").read_bytes() == (folder / "refiner.safetensors").read_bytes()


def test_lora_goes_on_from_a_refiner_named_as_in_load_refiner(host, dataset):
    host.run(graph(dataset, "test_train g")).expect_success()
    folder = host.base / "output" / "refiners"
    start = folder / "test_train g" / "refiner.safetensors"
    more = {"refiner": {"start_from": "test_train g/refiner.safetensors"}, "lora": {"rank": 4}}
    prompt = graph(dataset, "test_train g lora", options={**more, "validation": {"pictures": 1, "crop": 16}})
    report = text(host.run(prompt).expect_success(), "report")
    assert "goes on from test_train g/refiner.safetensors" in report and "LoRA of rank 4" in report
    made = load_meta(folder / "test_train g lora" / "refiner.safetensors")
    assert made.training["start"]["sha256"] == hashlib.sha256(start.read_bytes()).hexdigest()
    assert load_lora_meta(folder / "test_train g lora" / "lora.safetensors").refiner == made.training["start"]["sha256"]
    listed = host.object_info("Ref2VLoadRefiner")["input"]["required"]["refiner"]
    assert "test_train g lora/refiner.safetensors" in str(listed) and "lora.safetensors" not in str(listed)

    assert "reused" in text(host.run(prompt).expect_success(), "report")
    assert "train" in host.run(prompt).expect_success().cached
    by_path = {**more, "refiner": {"start_from": str(start)}, "validation": {"pictures": 1, "crop": 16}}
    again = host.run(graph(dataset, "test_train g lora", options=by_path)).expect_success()
    assert "reused" in text(again, "report")  # what is in the file counts

    host.run(graph(dataset, "test_train g other", seed=9)).expect_success()
    start.write_bytes((folder / "test_train g other" / "refiner.safetensors").read_bytes())
    refused = host.run(prompt)  # not answered from the cache
    assert "refiner.start_from" in refused.error.message and "another configuration" in refused.error.message


def test_train_load_and_sample_in_one_graph(host, dataset):
    rgb = np.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=np.uint8)
    name = host.upload(Image.fromarray(rgb), "test_train.png")
    prompt = graph(dataset, "test_train f") | {
        "image": {"class_type": "LoadImage", "inputs": {"image": name}},
        "vae": {"class_type": "VAELoader", "inputs": {"vae_name": "pixel_space"}},
        "encode": {"class_type": "VAEEncode", "inputs": {"pixels": ["image", 0], "vae": ["vae", 0]}},
        "load": {"class_type": "Ref2VLoadRefiner", "inputs": {"refiner": "x", "strength": 1.0, "path": ["train", 0]}},
        "sample": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["load", 0], "positive": ["load", 1], "negative": ["load", 1], "latent_image": ["encode", 0],
                "seed": 5, "steps": 8, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
            },
        },
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["sample", 0], "vae": ["vae", 0]}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "test_train"}},
    }  # fmt: skip
    (saved,) = host.pictures(host.run(prompt).expect_success(), "save")
    assert saved.size == (24, 24)


@pytest.mark.parametrize(
    "inputs, said",
    [
        ({"dataset": ""}, "The dataset is not given"),
        ({"dataset": "/etc"}, "The dataset must lie inside"),
        ({"dataset": "refiner_datasets/none"}, "The dataset does not exist"),
        ({"run_name": "a/b"}, "run_name may hold"),
        ({"run_name": " "}, "run_name is empty"),
        ({"crop": 3}, "data.crop"),
        ({"options": "{"}, "options: expected a JSON object"),
        ({"options": "[1]"}, "options: expected a JSON object"),
        ({"options": "[" * 5000}, "options: expected a JSON object"),
        ({"options": '{"epoch": 3}'}, "perhaps epochs is meant"),
        ({"options": '{"epochs": 3}'}, "epochs has an input of its own"),
        ({"options": '{"data": {"batch_size": 3}}'}, "data.batch_size has an input of its own"),
        ({"options": '{"data": 3}'}, "data must be a JSON object"),
        ({"options": '{"data": {"workers": 2}}'}, "data.workers must stay 0"),
        ({"options": '{"device": 77}'}, "device"),
        ({"options": '{"lora": {}}'}, "lora needs refiner.start_from"),
        ({"options": '{"refiner": {"start_from": "none.safetensors"}}'}, "refiner.start_from does not exist"),
        ({"options": '{"refiner": {"start_from": "/etc/passwd"}}'}, "refiner.start_from must lie inside"),
        ({"options": '{"refiner": {"start_from": 3}}'}, "refiner.start_from"),
        ({"preset": "huge"}, "preset"),
        ({"precision": "fp8"}, "precision"),
        ({"if_run_exists": "maybe"}, "if_run_exists"),
    ],
)
def test_bad_input_is_one_sentence(host, dataset, inputs, said):
    prompt = graph(dataset, "test_train bad")
    prompt["train"]["inputs"].update(inputs)
    result = host.run(prompt)
    assert result.status in ("error", "refused")
    assert said in result.error.message and "\n" not in result.error.message


def test_a_device_that_this_machine_lacks_runs_with_a_note(host, dataset):
    result = host.run(graph(dataset, "test_train device", options={**OPTIONS, "device": "cuda:77"})).expect_success()
    assert "'cuda:77' of the options is not on this machine" in text(result, "report")


def test_a_dataset_that_is_none_is_named(host, dataset):
    other = host.base / "output" / "refiner_datasets" / "test_train_empty"
    os.makedirs(other, exist_ok=True)
    result = host.run(graph(other, "test_train bad"))
    assert result.status == "error" and "test_train_empty" in result.error.message
    assert not (host.base / "output" / "refiners" / "test_train bad").exists()
