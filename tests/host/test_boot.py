"""The real host boots with the pack in it, and its own nodes work on the checkpoints that the other tests use."""

import os
import re
import sys

import numpy as np
import pytest

from tests.host.checkpoints import BROKEN, BROKEN_UNET, MIN
from tests.host.client import HostDied
from tests.host.server import PACK, PACK_NAME, HostServer


def text_to_picture(checkpoint: str, side: int = 64, steps: int = 4) -> dict:
    """The smallest text-to-image prompt, in API format."""
    return {
        "checkpoint": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": checkpoint}},
        "text": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["checkpoint", 1], "text": "a boat"}},
        "nothing": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["checkpoint", 1], "text": ""}},
        "latent": {"class_type": "EmptyLatentImage", "inputs": {"width": side, "height": side, "batch_size": 1}},
        "sample": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["checkpoint", 0],
                "positive": ["text", 0],
                "negative": ["nothing", 0],
                "latent_image": ["latent", 0],
                "seed": 1,
                "steps": steps,
                "cfg": 7.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 1.0,
            },
        },
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["sample", 0], "vae": ["checkpoint", 2]}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "boot"}},
    }


# ------------------------------------------------------------------------------------------------------------ the pack


def about_the_pack(log: str, *others: os.PathLike) -> list[str]:
    """The lines of a host's log that name this pack.

    others: folders whose own name may be the pack's. The README's clone is called so and holds the host and the
    virtual environment, so a complaint of the host about a file of its own has our name in its path.
    """
    for folder in sorted({str(folder) for other in others for folder in (other, os.path.realpath(other))}, key=len):
        log = log.replace(folder, "")
    return [line for line in log.splitlines() if PACK_NAME in line]


def test_a_complaint_of_the_host_in_a_folder_of_our_name_is_not_about_us(tmp_path):
    clone = tmp_path / "a folder" / PACK_NAME
    host, venv, base = clone / ".dev" / "host" / "ComfyUI", clone / ".dev" / "venv", tmp_path / "base"
    of_the_host = f'  File "{host}/comfy_extras/nodes_audio.py", line 4\nIMPORT FAILED: {venv}/lib/torchaudio\n'
    of_ours = f"Cannot import {base}/custom_nodes/{PACK_NAME} module for custom nodes\n"
    assert about_the_pack(of_the_host + of_ours, host, venv) == [of_ours.strip()]


@pytest.mark.path
def test_pack_is_imported_without_a_word_of_complaint(host):
    # Up to the line that ends the boot: later tests that share this host provoke refusals, which it logs with our name.
    boot, ready, _ = host.log.partition("To see the GUI go to")
    about_us = about_the_pack(boot, host.host, sys.prefix, sys.base_prefix)
    assert ready, host.log
    assert any("seconds" in line for line in about_us), host.log  # the host's list of import times
    assert not [line for line in about_us if re.search("error|warning|fail|cannot|traceback", line, re.I)], host.log


@pytest.mark.path
def test_every_node_of_the_pack_is_served_with_its_schema(host):
    nodes = {name: info for name, info in host.object_info().items() if PACK_NAME in info["python_module"]}
    assert nodes
    for name, info in nodes.items():
        assert name.startswith("Ref2V")
        assert info["display_name"] and info["description"] and info["category"].startswith("Ref2V"), name


# ------------------------------------------------------------------------------------- the checkpoints and the client


def test_small_checkpoint_gives_a_finite_picture(host):
    before = len(host.log)
    result = host.run(text_to_picture(MIN)).expect_success()
    (picture,) = host.pictures(result, "save")
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float64)
    assert pixels.shape == (64, 64, 3)
    assert pixels.std() > 2, "the picture is flat: NaN is saved as black"
    assert "invalid value" not in host.log[before:]  # numpy's words for a NaN cast to a byte
    assert [(value, top) for node, value, top in result.progress if node == "sample"] == [(i, 4) for i in (1, 2, 3, 4)]


def test_same_prompt_again_comes_from_the_cache(host):
    prompt = text_to_picture(MIN)
    host.run(prompt).expect_success()
    assert set(host.run(prompt).expect_success().cached) == set(prompt)


@pytest.mark.parametrize("checkpoint, words", [(BROKEN, "clip missing"), (BROKEN_UNET, "unet missing")])
def test_host_only_logs_a_missing_key(host, checkpoint, words):
    """Why the pack checks the keys of a checkpoint itself: the host goes on, with weights that nobody has set."""
    before = len(host.log)
    host.run(text_to_picture(checkpoint)).expect_success()
    assert words in host.log[before:]


def test_refused_prompt_names_the_node_and_the_input(host):
    prompt = text_to_picture(MIN)
    prompt["sample"]["inputs"]["steps"] = 0
    result = host.run(prompt)
    assert (result.status, result.error.node_id, result.error.node_type) == ("refused", "sample", "KSampler")
    assert "steps" in result.error.message


def test_error_in_a_node_comes_back_with_its_words(host):
    host.upload(b"not a picture", "broken.png")
    prompt = {
        "load": {"class_type": "LoadImage", "inputs": {"image": "broken.png"}},
        "save": {"class_type": "PreviewImage", "inputs": {"images": ["load", 0]}},
    }
    result = host.run(prompt)
    assert (result.status, result.error.node_id) == ("error", "load")
    assert "cannot identify image file" in result.error.message


def test_interrupt_stops_a_prompt_in_its_middle(host):
    def at_the_first_step(kind, data):
        if kind == "progress":
            host.interrupt()

    result = host.run(text_to_picture(MIN, steps=200), on_event=at_the_first_step)
    assert (result.status, result.error.node_id) == ("interrupted", "sample")
    assert len(result.progress) < 100


# ----------------------------------------------------------------------------------------------- the host as a process


def test_host_that_cannot_start_shows_the_end_of_its_log(host_path):
    server = HostServer(host_path, pack=None, args=("--no-such-option",))
    with pytest.raises(HostDied, match="--no-such-option"):
        server.start()
    assert server.process is None and not server.base.exists()


@pytest.mark.path
@pytest.mark.skipif(os.name == "nt", reason="file modes")
def test_linked_pack_is_this_repository(host):
    assert (host.base / "custom_nodes" / PACK_NAME).resolve() == PACK
