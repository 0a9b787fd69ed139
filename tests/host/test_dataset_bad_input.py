"""Build Refiner Dataset given what it cannot use: one sentence each, and nothing half-written."""

import os
import re

import pytest
import safetensors.torch
import torch
from PIL import Image

from tests.host.checkpoints import BROKEN, BROKEN_UNET, MIN
from tests.host.dataset_graphs import (
    SAMPLING,
    THIRD,
    checkpoint,
    dataset,
    datasets,
    prompt,
    report,
)


def test_bad_files_among_good_ones_are_skipped_and_named(host, folder):
    (folder / "zero.png").write_bytes(b"")
    (folder / "text.jpg").write_text("not a picture")
    (folder / "cut.png").write_bytes((folder / "aaa.png").read_bytes()[:300])
    Image.new("RGB", (1, 1)).save(folder / "one.png")
    Image.new("RGB", (2000, 16)).save(folder / "long.png")
    Image.open(folder / "bbb.png").convert("CMYK").save(folder / "cmyk.jpg")
    (folder / "lonely.txt").write_text("caption of nothing")
    (folder / "aaa.txt").write_bytes(b"\xff\xfe\xff")
    said, data = report(host.run(prompt("bad", folder=folder.name))), dataset(host, "bad")
    assert {pair.source for pair in data.pairs} == {"cmyk.jpg", *(f"{c * 3}.png" for c in "bcdefgh")}
    for name in ("zero.png", "text.jpg", "cut.png", "one.png", "long.png", "aaa.txt"):
        assert name in said, name
    assert "Skipped 6" in said and "Captions without a picture (1): lonely.txt" in said


@pytest.mark.parametrize(
    "inputs, words",
    [
        ({"folder": "empty"}, ["holds no picture", "empty"]),
        ({"folder": "missing"}, ["does not exist", "missing"]),
        ({"folder": "/etc"}, ["must lie inside", "/etc"]),
        ({"folder": "../.."}, ["must lie inside"]),
        ({"folder": "broken"}, ["None of the 1 pictures can be used", "zero.png"]),
        ({}, ["neither is given"]),
        ({"folder": "broken", "vae": None}, ["need a vae"]),
        ({"folder": "broken", "name": "../escape"}, ["name", "'/'"]),
        ({"folder": "broken", "name": " "}, ["name is empty"]),
        ({"folder": "broken", "crop": "diagonal"}, ["crop must be one of center, random; got 'diagonal'"]),
    ],
)
def test_bad_settings_get_one_sentence(host, inputs, words):
    (host.base / "input" / "empty").mkdir(exist_ok=True)
    (host.base / "input" / "broken").mkdir(exist_ok=True)
    (host.base / "input" / "broken" / "zero.png").write_bytes(b"")
    vae = inputs.pop("vae", ("pixels", 0))
    result = host.run(prompt(**{"name": "sentence", "vae": vae, **inputs}))
    assert (result.status, result.error.node_id) == ("error", "build")
    assert result.error.exception_type.endswith("BadInput")
    assert all(word in result.error.message for word in words), result.error.message
    assert datasets(host, "sentence") == []


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_a_link_among_the_pictures_does_not_lead_out(host, folder, stills):
    (folder / "out.webp").symlink_to(stills[0])
    (folder / "aaa.txt").symlink_to("/etc/hostname")
    (folder / "in.png").symlink_to(folder / "bbb.png")
    said, data = report(host.run(prompt("links", folder=folder.name))), dataset(host, "links")
    assert {pair.source for pair in data.pairs} == {"in.png", *(f"{c * 3}.png" for c in "bcdefgh")}
    assert "out.webp is a link that leads out" in said and "aaa.txt is a link that leads out" in said


@pytest.mark.parametrize("field", ["sampler_name", "scheduler"])
def test_a_sampler_that_the_host_does_not_have_is_named(host, folder, field):
    base = {"class_type": "Ref2VSampleBase", "inputs": {"model": ["load", 0], **SAMPLING, field: "foo"}}
    result = host.run(prompt("foo", base=base, vae=("load", 2), folder=folder.name, nodes={"load": checkpoint()}))
    assert result.status in ("error", "refused") and field in result.error.message and "'foo'" in result.error.message


@pytest.mark.parametrize("name, link, words", [(BROKEN, "clip", "text encoder clip_l"), (BROKEN_UNET, "model", "UNet")])
def test_broken_checkpoint_is_named_before_any_work(host, folder, name, link, words):
    base, more = THIRD, {"clip": ["load", 1]}
    if link == "model":
        base, more = {"class_type": "Ref2VSampleBase", "inputs": {"model": ["load", 0], **SAMPLING}}, {}
    nodes = {"load": checkpoint(name)}
    result = host.run(prompt(f"broken {link}", base=base, vae=("load", 2), folder=folder.name, nodes=nodes, **more))
    assert result.status == "error" and result.error.node_id == ("base" if link == "model" else "build")
    assert name in result.error.message and words in result.error.message
    assert not result.previews


def test_broken_text_encoder_behind_a_conditioning_is_named(host, folder):
    nodes = {
        "load": checkpoint(),
        "other": checkpoint(BROKEN),
        "text": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["other", 1], "text": "a boat"}},
    }
    sample = {"model": ["load", 0], "positive": ["text", 0], **SAMPLING}
    base = {"class_type": "Ref2VSampleBase", "inputs": sample}
    result = host.run(prompt("behind", base=base, vae=("load", 2), folder=folder.name, nodes=nodes))
    assert result.status == "error" and result.error.node_id == "base" and BROKEN in result.error.message


def test_base_model_without_any_text_asks_for_it(host, folder):
    base = {"class_type": "Ref2VSampleBase", "inputs": {"model": ["load", 0], **SAMPLING}}
    result = host.run(prompt("textless", base=base, vae=("load", 2), folder=folder.name, nodes={"load": checkpoint()}))
    assert result.status == "error" and "needs conditioning" in result.error.message


def test_vae_of_another_family_is_refused(host, folder):
    base = {"class_type": "Ref2VSampleBase", "inputs": {"model": ["load", 0], **SAMPLING}}
    nodes = {"load": checkpoint()}
    result = host.run(prompt("family", base=base, clip=["load", 1], folder=folder.name, nodes=nodes))
    assert result.status == "error"
    assert result.error.message.strip() == (
        "The VAE gives 3 channels (aaa.png), the base model takes 4 (SD15): give the VAE that belongs to the base "
        "model."
    )


def test_vae_that_gives_nan_names_the_picture(host, folder):
    state = torch.load(host.base / "models" / "checkpoints" / MIN, weights_only=True)["state_dict"]
    prefix = "first_stage_model."
    vae = {key.removeprefix(prefix): value.clone() for key, value in state.items() if key.startswith(prefix)}
    vae["taesd_encoder.4.conv.2.bias"][0] = float("nan")
    (host.base / "models" / "vae").mkdir(parents=True, exist_ok=True)
    vae = {key: value.contiguous() for key, value in vae.items()}
    safetensors.torch.save_file(vae, host.base / "models" / "vae" / "nan.safetensors")
    nodes = {"nan": {"class_type": "VAELoader", "inputs": {"vae_name": "nan.safetensors"}}}
    result = host.run(prompt("nan", vae=("nan", 0), folder=folder.name, nodes=nodes))
    assert result.status == "error" and "aaa.png" in result.error.message
    assert "taesd_encoder.4.conv.2" in result.error.message
    assert datasets(host, "nan") == []


def test_what_a_stopped_build_has_sampled_is_kept(host, folder):
    base = {"class_type": "Ref2VSampleBase", "inputs": {"model": ["load", 0], **SAMPLING, "seed": 77}}
    build = prompt(
        "resumed", base=base, vae=("load", 2), clip=["load", 1], folder=folder.name, nodes={"load": checkpoint()}
    )

    def in_the_middle(kind, data):
        if kind == "progress" and data["node"] == "build" and data["value"] >= 10:
            host.interrupt()

    assert host.run(build, on_event=in_the_middle).status == "interrupted" and datasets(host, "resumed") == []
    said = report(host.run(build))
    sampled, found = map(int, re.search(r"Base latents: (\d+) sampled, (\d+) found", said).groups())
    assert found >= 6 and sampled + found == 8


def test_interrupt_leaves_nothing_and_the_next_build_is_whole(host, folder):
    build = prompt("stopped", vae=("load", 2), folder=folder.name, mirror=True, nodes={"load": checkpoint()})

    def in_the_middle(kind, data):
        if kind == "progress" and data["node"] == "build" and data["value"] >= 10:
            host.interrupt()

    result = host.run(build, on_event=in_the_middle)
    assert result.status == "interrupted" and result.error.node_id == "build"
    assert datasets(host, "stopped") == []
    assert report(host.run(build)).startswith("Built")
    assert len(dataset(host, "stopped").pairs) == 16
