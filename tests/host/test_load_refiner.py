"""Load Refiner, Refiner Conditioning and Refiner Sigmas in the graph of the real host, in pixel space."""

import io
import os

import numpy as np
import pytest
import torch
from PIL import Image

from tests.host.client import PromptRefused
from training.config.network import UNetConfig
from training.objectives.residual import flow
from training.objectives.residual.file import RefinerMeta, save_refiner
from training.objectives.residual.model import Refiner
from training.objectives.residual.unet import build_unet

NAME = "test_load/refiner.safetensors"
S = 0.1
LATENT = {"name": "ChromaRadiance", "channels": 3, "scale": 1.0, "shift": 0.0, "downscale": 1}


def write_refiner(path, seed=0):
    """A refiner of random weights for pixels."""
    config = UNetConfig(
        latent_channels=3, block_channels=(32, 32), layers_per_block=1, transformer_depth=(0, 0), middle_depth=1,
        heads=(2, 2), context_dim=8,
    )  # fmt: skip
    torch.manual_seed(seed)
    net = build_unet(config).requires_grad_(False)
    net.conv_out.weight.normal_(0, 0.05)
    meta = RefinerMeta(
        unet=config, latent=LATENT, noise_scale=S, residual_rms=S, c_v=flow.velocity_scale(S, S),
        sigmas=flow.sigmas(8).tolist(), training={},
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    save_refiner(path, net.state_dict(), {"context": torch.zeros(1, 8)}, meta)
    return path


@pytest.fixture(scope="module")
def picture(host):
    """A smooth picture of 40 x 33 in input/, as floats [33, 40, 3]."""
    y, x = np.mgrid[0:33, 0:40] / 40
    rgb = np.stack([x, y, 0.5 + 0.4 * np.sin(9 * x * y)], axis=2)
    name = host.upload(Image.fromarray((255 * rgb).round().astype(np.uint8)), "test_load.png")
    return name, (255 * rgb).round().astype(np.uint8).astype(np.float32) / 255


@pytest.fixture(scope="module")
def refiner(host):
    return write_refiner(host.base / "models" / "refiners" / NAME)


def graph(picture, *, load=None, sampler=None, seed=5):
    """LoadImage -> pixel VAE -> KSampler with the refiner -> SaveImage; `load` and `sampler` change inputs."""
    sampler = {
        "model": ["load", 0], "positive": ["load", 1], "negative": ["load", 1], "latent_image": ["encode", 0],
        "seed": seed, "steps": 8, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
    } | (sampler or {})  # fmt: skip
    load = {"refiner": NAME, "strength": 1.0} | (load or {})
    return {
        "image": {"class_type": "LoadImage", "inputs": {"image": picture}},
        "vae": {"class_type": "VAELoader", "inputs": {"vae_name": "pixel_space"}},
        "encode": {"class_type": "VAEEncode", "inputs": {"pixels": ["image", 0], "vae": ["vae", 0]}},
        "load": {"class_type": "Ref2VLoadRefiner", "inputs": load},
        "sample": {"class_type": "KSampler", "inputs": sampler},
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["sample", 0], "vae": ["vae", 0]}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "test_load"}},
    }


def pixels(host, result):
    (saved,) = host.pictures(result.expect_success(), "save")
    return np.asarray(saved.convert("RGB"), dtype=np.float32) / 255


def test_ksampler_gives_the_picture_that_the_core_gives(host, refiner, picture):
    name, rgb = picture
    got = pixels(host, host.run(graph(name)))
    core, empty, meta = Refiner.from_file(refiner)
    b = torch.from_numpy(rgb).permute(2, 0, 1)[None] * 2 - 1
    e = torch.randn(b.shape, generator=torch.manual_seed(5))
    expected = core.refine(b, e, {"context": empty["context"][None]}, flow.sigmas(8))
    expected = (expected[0].permute(1, 2, 0) / 2 + 0.5).clamp(0, 1).numpy()
    assert np.abs(got - expected).max() <= 1 / 255 + 1e-4  # SaveImage rounds down to 8 bits
    assert np.abs(expected - rgb).mean() > 2 / 255


def test_strength_0_gives_the_base(host, refiner, picture):
    name, rgb = picture
    got = pixels(host, host.run(graph(name, load={"strength": 0.0})))
    assert np.abs(got - rgb).max() <= 1 / 255 + 1e-4


def test_the_list_shows_the_file_and_not_a_runs_checkpoints(host, refiner):
    write_refiner(host.base / "output" / "refiners" / "test_load_run" / "checkpoints" / "c.safetensors")
    inputs = host.object_info("Ref2VLoadRefiner")["input"]["required"]
    options = inputs["refiner"][1]["options"]
    assert NAME in options
    assert not [option for option in options if "checkpoints" in option]


def test_a_linked_path_wins_over_the_list(host, refiner, picture):
    other = write_refiner(host.base / "output" / "refiners" / "test_load_run" / "refiner.safetensors", seed=1)
    prompt = graph(picture[0], load={"path": ["text", 0]})
    prompt["text"] = {"class_type": "PrimitiveString", "inputs": {"value": str(other)}}
    linked = pixels(host, host.run(prompt))
    listed = pixels(host, host.run(graph(picture[0])))
    assert np.abs(linked - listed).mean() > 2 / 255
    relative = graph(picture[0], load={"path": ["text", 0]})
    relative["text"] = {
        "class_type": "PrimitiveString",
        "inputs": {"value": "refiners/test_load_run/refiner.safetensors"},
    }
    assert np.array_equal(pixels(host, host.run(relative)), linked)


def test_a_changed_file_is_loaded_again(host, picture):
    path = write_refiner(host.base / "models" / "refiners" / "test_load_changes.safetensors", seed=2)
    prompt = graph(picture[0], load={"refiner": path.name})
    first = pixels(host, host.run(prompt))
    again = host.run(prompt)
    assert "load" in again.cached
    write_refiner(path, seed=3)
    second = host.run(prompt)
    assert "load" in second.ran
    assert np.abs(pixels(host, second) - first).mean() > 2 / 255


def test_another_strength_reads_nothing(host, picture):
    """The file is made unreadable, with its size and time kept: whoever reads it again fails."""
    path = write_refiner(host.base / "models" / "refiners" / "test_load_strength.safetensors", seed=4)
    whole = pixels(host, host.run(graph(picture[0], load={"refiner": path.name})))
    stamp = path.stat()
    path.write_bytes(b"x" * stamp.st_size)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    for strength in (0.5, 0.25):
        half = host.run(graph(picture[0], load={"refiner": path.name, "strength": strength}))
        assert "load" in half.ran
        away = np.abs(pixels(host, half) - (whole * strength + picture[1] * (1 - strength)))
        assert away[(whole > 0) & (whole < 1)].max() <= 2.5 / 255  # what was clipped cannot be blended back


def test_a_replaced_file_behind_a_linked_path_is_loaded_again(host, picture):
    path = write_refiner(host.base / "output" / "refiners" / "test_load_linked" / "refiner.safetensors", seed=5)
    prompt = graph(picture[0], load={"path": ["text", 0]})
    prompt["text"] = {"class_type": "PrimitiveString", "inputs": {"value": str(path)}}
    first = pixels(host, host.run(prompt))
    assert "load" in host.run(prompt).cached
    write_refiner(path, seed=6)
    second = host.run(prompt)
    assert "load" in second.ran and np.abs(pixels(host, second) - first).mean() > 2 / 255
    assert "load" in host.run(prompt).cached


def test_split_run_and_own_sigmas_give_the_same_picture(host, refiner, picture):
    whole = pixels(host, host.run(graph(picture[0])))
    prompt = graph(picture[0])
    base = {"class_type": "Ref2VConditionRefiner", "inputs": {"conditioning": ["load", 1], "base": ["encode", 0]}}
    common = {
        "model": ["load", 0], "noise_seed": 5, "steps": 8, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple",
    }  # fmt: skip
    first = common | {
        "add_noise": "enable", "positive": ["load", 1], "negative": ["load", 1], "latent_image": ["encode", 0],
        "start_at_step": 0, "end_at_step": 4, "return_with_leftover_noise": "enable",
    }  # fmt: skip
    second = common | {
        "add_noise": "disable", "positive": ["base", 0], "negative": ["base", 0], "latent_image": ["first", 0],
        "start_at_step": 4, "end_at_step": 10000, "return_with_leftover_noise": "disable",
    }  # fmt: skip
    prompt["base"] = base
    prompt["first"] = {"class_type": "KSamplerAdvanced", "inputs": first}
    prompt["sample"] = {"class_type": "KSamplerAdvanced", "inputs": second}
    assert np.abs(pixels(host, host.run(prompt)) - whole).max() <= 1 / 255 + 1e-6

    prompt = graph(picture[0])
    prompt["sigmas"] = {"class_type": "Ref2VGetRefinerSigmas", "inputs": {"model": ["load", 0]}}
    prompt["euler"] = {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}}
    custom = {
        "model": ["load", 0], "add_noise": True, "noise_seed": 5, "cfg": 1.0, "positive": ["load", 1],
        "negative": ["load", 1], "sampler": ["euler", 0], "sigmas": ["sigmas", 0], "latent_image": ["encode", 0],
    }  # fmt: skip
    prompt["sample"] = {"class_type": "SamplerCustom", "inputs": custom}
    assert np.abs(pixels(host, host.run(prompt)) - whole).max() <= 1 / 255 + 1e-6


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"load": {"refiner": None}}, "No refiner is chosen"),
        ({"load": {"refiner": "gone.safetensors"}}, "'gone.safetensors' does not exist"),
        ({"load": {"refiner": "(no files yet: link a path)"}}, "No refiner is chosen"),
        ({"sampler": {"sampler_name": "euler_ancestral"}}, "euler_ancestral does not fit a refiner"),
        ({"sampler": {"denoise": 0.5}}, "set denoise to 1"),
        ({"sampler": {"scheduler": "ddim_uniform"}}, "another scheduler than ddim_uniform"),
        ({"sampler": {"latent_image": ["empty", 0]}}, "connect the base's LATENT"),
    ],
)
def test_what_does_not_fit_is_one_sentence_in_the_nodes_error(host, refiner, picture, changes, said):
    prompt = graph(picture[0], **changes)
    if changes.get("sampler", {}).get("latent_image"):
        inputs = {"width": 320, "height": 264, "batch_size": 1}
        prompt["empty"] = {"class_type": "EmptyLatentImage", "inputs": inputs}
    result = host.run(prompt)
    assert result.status == "error"
    assert said in result.error.message and "\n" not in result.error.message


@pytest.mark.parametrize("path", ["/etc/passwd", "../../../../etc/passwd", "/nonexistent/refiner.safetensors"])
def test_paths_outside_the_hosts_folders_are_refused_alike(host, picture, path):
    prompt = graph(picture[0], load={"path": ["text", 0]})
    prompt["text"] = {"class_type": "PrimitiveString", "inputs": {"value": path}}
    assert "must lie inside" in host.run(prompt).error.message


def test_a_strength_outside_0_to_1_is_refused_before_anything_runs(host, refiner, picture):
    with pytest.raises(PromptRefused, match="bigger than max"):
        host.queue(graph(picture[0], load={"strength": 1.5}))


def test_another_model_has_no_refiner_sigmas(host, refiner, picture):
    from tests.host.checkpoints import MIN

    prompt = {
        "checkpoint": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": MIN}},
        "sigmas": {"class_type": "Ref2VGetRefinerSigmas", "inputs": {"model": ["checkpoint", 0]}},
        "show": {"class_type": "PreviewAny", "inputs": {"source": ["sigmas", 0]}},
    }
    assert "MODEL of Load Refiner" in host.run(prompt).error.message


def test_saved_picture_carries_the_graph(host, refiner, picture):
    result = host.run(graph(picture[0]), extra_data={"extra_pnginfo": {"workflow": {"nodes": []}}}).expect_success()
    (file,) = result.outputs["save"]["images"]
    saved = Image.open(io.BytesIO(host.view(file["filename"], file["subfolder"], file["type"])))
    assert "Ref2VLoadRefiner" in saved.info["prompt"]
    assert "nodes" in saved.info["workflow"]
