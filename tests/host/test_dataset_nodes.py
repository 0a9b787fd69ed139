"""Build Refiner Dataset and its four bases, queued on the real host: what lies on the disk, and what a person reads."""

import json
import os
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from tests.host.dataset_graphs import (
    SAMPLING,
    checkpoint,
    dataset,
    datasets,
    prompt,
    report,
)
from training.data.buckets import resize_and_crop
from training.data.degrade import degrade
from training.data.pictures import read_picture
from training.data.shards import RefinerDataset

# --------------------------------------------------------------------------------------------- pictures and degradation


def test_pixel_space_pairs_hold_the_pictures_themselves(host, stills):
    folder = host.base / "input" / "stills"
    folder.mkdir()
    for still in stills[:8]:
        shutil.copy(still, folder)
    result = host.run(prompt("stills", folder="stills", held_out=2))
    said, data = report(result), dataset(host, "stills")
    assert data.latent == {"name": "ChromaRadiance", "channels": 3, "scale": 1.0, "shift": 0.0, "downscale": 1}
    assert data.info["base"] == {"kind": "degradation", "degradation": "resize", "amount": 3.0}
    assert len(data.pairs) == 8 and len(data.held_out) >= 2 and data.context is None
    for i, pair in enumerate(data.pairs):
        picture = resize_and_crop(read_picture(folder / pair.source), (pair.width, pair.height))
        item = data.read(i)
        assert pair.height * pair.width <= 64 * 64
        assert torch.allclose(item["z"], picture * 2 - 1, atol=1e-6)
        assert torch.allclose(item["b"], degrade(picture, "resize", 3.0) * 2 - 1, atol=1e-6)
    assert said.startswith(f"Built {data.folder.name}: training pairs {len(data.train)}")
    assert "ChromaRadiance" in said and f"{data.residual_rms:.4g}" in said
    assert not [name for name in os.listdir(data.folder) if name.endswith((".partial", ".lock"))]


def test_looks_before_anything_long(host, folder):
    """Contact sheet and estimate come first, then the bar moves over the pictures."""
    result = host.run(prompt("look", folder=folder.name))
    assert result.previews and result.previews[0][0] == "build"
    values = [value for node, value, _ in result.progress if node == "build"]
    assert values == sorted(values) and values[-1] == 16  # eight looked at, eight built
    (sheet,) = host.pictures(result, "build")
    assert sheet.width > 200 and np.asarray(sheet.convert("RGB")).std() > 20
    assert "estimated" in report(result)


def test_plan_only_writes_nothing(host, folder):
    (folder / "zero.png").write_bytes(b"")
    said = report(host.run(prompt("plan", folder=folder.name, plan_only=True, held_out=2)))
    assert datasets(host, "plan") == []
    assert "nothing was written" in said and "zero.png is empty" in said and "held out: 2" in said and "about" in said


def test_outputs_are_path_hash_picture_and_text(host, folder):
    nodes = {
        "save": {"class_type": "SaveImage", "inputs": {"images": ["build", 2], "filename_prefix": "sheet"}},
        "path": {"class_type": "PreviewAny", "inputs": {"source": ["build", 0]}},
        "hash": {"class_type": "PreviewAny", "inputs": {"source": ["build", 1]}},
    }
    result = host.run(prompt("outputs", folder=folder.name, nodes=nodes)).expect_success()
    data = dataset(host, "outputs")
    assert result.outputs["path"]["text"] == [str(data.folder)]
    assert result.outputs["hash"]["text"] == [data.content_hash]
    assert host.pictures(result, "save")[0].mode == "RGB"


def test_mirror_adds_a_copy_of_training_pictures_only(host, folder):
    report(host.run(prompt("mirror", folder=folder.name, mirror=True, held_out=2, crop="random")))
    data = dataset(host, "mirror")
    assert len(data.held_out) == 2 and len(data.train) == 12
    for i, pair in enumerate(data.pairs):
        if pair.flip:
            assert data.pairs[i - 1].source == pair.source
            assert torch.equal(data.read(i)["z"], data.read(i - 1)["z"].flip(-1))


def test_image_batch_instead_of_a_folder(host, folder):
    picture = host.upload(Image.open(folder / "aaa.png"), "batch.png")
    nodes = {"load": {"class_type": "LoadImage", "inputs": {"image": picture}}}
    nodes["twice"] = {"class_type": "RepeatImageBatch", "inputs": {"image": ["load", 0], "amount": 2}}
    report(host.run(prompt("batch", images=["twice", 0], nodes=nodes)))
    data = dataset(host, "batch")
    assert [pair.source for pair in data.pairs] == ["image00000", "image00001"]
    wanted = resize_and_crop(read_picture(folder / "aaa.png"), (data.pairs[0].width, data.pairs[0].height))
    assert torch.allclose(data.read(1)["z"], wanted * 2 - 1, atol=1e-6)


def test_a_changed_dataset_encodes_what_changed_alone(host, folder):
    """Targets and degraded bases are two latents a picture."""
    shutil.rmtree(host.base / "output" / "refiner_datasets" / ".latents", ignore_errors=True)  # other tests' pictures
    latents = {"vae": ("load", 2), "nodes": {"load": checkpoint()}, "folder": folder.name}
    first = report(host.run(prompt("encoded", **latents)))
    assert "Latents: 16 encoded, 0 found in the latent cache." in first
    picture = Image.open(folder / "ccc.png")
    picture.putpixel((40, 40), (255, 0, 255))
    picture.save(folder / "ccc.png")
    touched = report(host.run(prompt("encoded", **latents)))
    assert "Latents: 2 encoded, 14 found in" in touched
    built = max(datasets(host, "encoded"), key=os.path.getmtime)
    assert "Latents: " not in (built / "report.txt").read_text()  # a dataset's bytes do not depend on the cache
    before, after = (RefinerDataset.open(path) for path in sorted(datasets(host, "encoded"), key=os.path.getmtime))
    for i, pair in enumerate(after.pairs):
        for name in "zb":  # each dataset has measured a scale of its own, so raw latents are compared
            old, new = (data.read(i)[name] / data.latent["scale"] + data.latent["shift"] for data in (before, after))
            assert torch.allclose(old, new, rtol=1e-5, atol=1e-5) == (pair.source != "ccc.png")
    resized = report(host.run(prompt("encoded", size=128, **latents)))
    sizes = [(pair.height, pair.width) for pair in after.pairs]
    large = RefinerDataset.open(max(datasets(host, "encoded"), key=os.path.getmtime))
    changed = sum(size != (pair.height, pair.width) for size, pair in zip(sizes, large.pairs, strict=True))
    assert changed and f"Latents: {2 * changed} encoded" in resized
    other_dtype = {"class_type": "Ref2VSelectVAEPrecision", "inputs": {"vae": ["load", 2], "encoder": "bf16",
                                                                       "decoder": "default"}}  # fmt: skip
    nodes = {"load": checkpoint(), "bf16": other_dtype}
    assert "Latents: 16 encoded" in report(
        host.run(prompt("encoded", vae=("bf16", 0), folder=folder.name, nodes=nodes))
    )


# ------------------------------------------------------------------------------------------------- the base model, text


def test_base_from_model_is_what_its_ksampler_gives(host, folder):
    """Captions through CLIP, latents through the checkpoint's VAE, b from the KSampler's own code on the same noise."""
    for path in sorted(folder.glob("*.png"))[3:]:
        path.unlink()
    (folder / "aaa.txt").write_text("a boat", encoding="utf-8")
    sample = {"class_type": "Ref2VSampleBase", "inputs": {"model": ["load", 0], **SAMPLING}}
    nodes = {"load": checkpoint()}
    built = prompt(
        "model", base=sample, vae=("load", 2), clip=["load", 1], folder=folder.name, caption="a picture", nodes=nodes
    )
    said, data = report(host.run(built)), dataset(host, "model")
    assert data.latent == {"name": "SD15", "channels": 4, "scale": 0.18215, "shift": 0.0, "downscale": 8}
    base = data.info["base"]
    assert base["kind"] == "model" and base["name"] == "SD15" and base["parameters"] > 1e7 and base["denoise"] == 0.3
    assert f"{base['parameters'] / 1e6:.1f} M parameters" in said
    assert [pair.caption for pair in data.pairs] == ["a boat", "a picture", "a picture"]
    assert data.context["tokens"] == 77 and data.context["dim"] == 768 and data.context["pooled"] == 0
    contexts = [data.read(i)["context"] for i in range(3)]
    assert torch.equal(contexts[1], contexts[2]) and not torch.equal(contexts[0], contexts[1])
    assert data.empty_context()["context"].shape == (77, 768)

    # The same in the host's own nodes, for the second picture: VAE Encode, KSampler, Save Latent.
    pair = data.pairs[1]
    cut = resize_and_crop(read_picture(folder / pair.source), (pair.width * 8, pair.height * 8))
    picture = host.upload(Image.fromarray((cut * 255).round().byte().permute(1, 2, 0).numpy()), "target.png")
    result = host.run(
        {
            "load": checkpoint(),
            "text": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["load", 1], "text": "a picture"}},
            "image": {"class_type": "LoadImage", "inputs": {"image": picture}},
            "encode": {"class_type": "VAEEncode", "inputs": {"pixels": ["image", 0], "vae": ["load", 2]}},
            "sample": {
                "class_type": "KSampler",
                "inputs": {
                    "model": ["load", 0],
                    "positive": ["text", 0],
                    "negative": ["text", 0],
                    "latent_image": ["encode", 0],
                    **SAMPLING,
                    "seed": SAMPLING["seed"] + 1,
                },
            },
            "save": {"class_type": "SaveLatent", "inputs": {"samples": ["sample", 0], "filename_prefix": "base"}},
        }
    ).expect_success()
    (saved,) = result.outputs["save"]["latents"]
    raw = safetensors.torch.load(host.view(saved["filename"], saved["subfolder"], saved["type"]))["latent_tensor"][0]
    b = data.read(1)["b"]
    # The uploaded picture is rounded to 8 bits, the builder's is not.
    assert (b - raw * 0.18215).norm() / b.norm() < 0.02
    assert (b - data.read(1)["z"]).norm() / b.norm() > 0.1


def test_vae_without_a_model_is_measured(host, folder):
    report(host.run(prompt("measured", vae=("load", 2), folder=folder.name, nodes={"load": checkpoint()})))
    data = dataset(host, "measured")
    assert data.latent["name"] == "measured" and data.latent["downscale"] == 8
    values = torch.cat([data.read(i)["z"].flatten() for i in data.train])
    assert abs(values.mean()) < 1e-3 and abs(values.std() - 1) < 1e-3
    assert data.info["vae"]["dtype"] == "float32" and data.info["preview"] is not None


# ----------------------------------------------------------------------------------------------- paired folder, latents


def test_paired_folder_matches_names_and_lists_the_rest(host, folder):
    before = folder.with_name("before")
    before.mkdir()
    for path in folder.glob("*.png"):
        picture = Image.open(path)
        picture.resize((picture.width // 2, picture.height // 2)).save(before / f"{path.stem}.jpg", quality=95)
    (before / "aaa.jpg").unlink()
    shutil.copy(before / "ccc.jpg", before / "bbb.jpg")  # another shape than its target
    shutil.copy(before / "ccc.jpg", before / "lonely.jpg")
    base = {"class_type": "Ref2VPairBase", "inputs": {"before_folder": "before"}}
    said, data = report(host.run(prompt("paired", base=base, folder=folder.name))), dataset(host, "paired")
    assert sorted({pair.source for pair in data.pairs}) == [f"{c * 3}.png" for c in "cdefgh"]
    assert "aaa.png has no partner" in said and "bbb.png is 144x96 and its partner bbb.jpg" in said
    assert "Pictures of the paired folder without a target (1): lonely.jpg" in said
    for i in range(len(data.pairs)):  # the partner is the same picture, smaller: near it, but not it
        item = data.read(i)
        assert 0 < (item["z"] - item["b"]).pow(2).mean().sqrt() < 0.5 * item["z"].std()
    picture = Image.open(before / "ddd.jpg").transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    picture.save(before / "ddd.jpg")  # the base node itself must notice
    assert report(host.run(prompt("paired", base=base, folder=folder.name))).startswith("Built")


def save_latent(host, name, samples):
    tensors = {"latent_tensor": samples.contiguous(), "latent_format_version_0": torch.tensor([])}
    safetensors.torch.save_file(tensors, host.base / "input" / name)
    return {"class_type": "LoadLatent", "inputs": {"latent": name}}


def latent_prompt(host, name, z, b, **inputs):
    nodes = {"z": save_latent(host, f"{name}-z.latent", z), "b": save_latent(host, f"{name}-b.latent", b)}
    base = {"class_type": "Ref2VLatentBase", "inputs": {"target": ["z", 0], "base_latent": ["b", 0]}}
    return prompt(name, base=base, vae=None, nodes=nodes, **inputs)


@pytest.mark.parametrize("shape", [(6, 16, 9, 12), (6, 16, 1, 9, 12)])
def test_latents_of_sixteen_channels(host, shape):
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3 + 1
    b = z + torch.randn(shape, generator=torch.Generator().manual_seed(1))
    name = f"latents{len(shape)}"
    said, data = report(host.run(latent_prompt(host, name, z, b, held_out=2))), dataset(host, name)
    assert data.latent["channels"] == 16 and data.latent["name"] == "measured" and data.info["vae"] is None
    assert len(data.train) == 4 and len(data.held_out) == 2 and "16 channels" in said
    scale, shift = data.latent["scale"], data.latent["shift"]
    assert abs(scale - 1 / 3) < 0.02 and abs(shift - 1) < 0.2
    wanted = (z.reshape(6, 16, 9, 12)[3] - shift) * scale
    assert torch.allclose(data.read(3)["z"], wanted, atol=1e-5)


def test_video_latents_are_refused(host):
    z = torch.randn(2, 16, 5, 8, 8)
    result = host.run(latent_prompt(host, "video", z, z + 1))
    assert result.status == "error" and "video latent of 5 frames" in result.error.message


# ------------------------------------------------------------------------------------------------------ again, or anew


def pad(path, size):
    """Bring a picture to a length in bytes: what follows its end is read by nobody."""
    assert path.stat().st_size <= size, "saved larger than before: take another picture"
    with open(path, "ab") as file:
        file.write(bytes(size - path.stat().st_size))


def test_same_again_is_reused_and_any_change_builds_anew(host, folder):
    def build(**inputs):
        return host.run(prompt("again", folder=folder.name, **inputs))

    (folder / "bbb.txt").write_text("before", encoding="utf-8")
    assert report(build()).startswith("Built")
    (first,) = datasets(host, "again")
    second = build()
    assert "build" in second.ran and report(second).startswith("Reused")
    assert "build" in build().cached  # nothing changed on the disk since: the host need not ask again
    assert len(datasets(host, "again")) == 1

    # An edited picture of the same size, and with its time kept (as rsync does it): a pixel.
    data = bytearray((folder / "aaa.png").read_bytes())
    picture = Image.open(folder / "aaa.png")
    picture.putpixel((3, 3), (255, 0, 255))
    before = (folder / "aaa.png").stat()
    picture.save(folder / "aaa.png", optimize=True)
    pad(folder / "aaa.png", before.st_size)
    os.utime(folder / "aaa.png", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert report(build()).startswith("Built")
    assert len(datasets(host, "again")) == 2
    (folder / "aaa.png").write_bytes(data)
    assert report(build()).startswith(f"Reused {first.name}")

    assert report(build(size=80)).startswith("Built")  # another resolution
    (folder / "bbb.txt").write_text("after", encoding="utf-8")
    assert report(build()).startswith("Built")  # another caption
    blur = {"class_type": "Ref2VDegradeBase", "inputs": {"kind": "blur", "amount": 2.0}}
    assert report(build(base=blur)).startswith("Built")  # another base
    assert len(datasets(host, "again")) == 5


def test_deleted_or_damaged_dataset_is_built_again(host, folder):
    def build():
        return report(host.run(prompt("gone", folder=folder.name)))

    assert build().startswith("Built")
    (first,) = datasets(host, "gone")
    index = json.loads((first / "index.json").read_text())
    shutil.rmtree(first)
    assert build().startswith("Built")
    assert json.loads((first / "index.json").read_text()) == index  # the same inputs give the same dataset
    shard = first / "shard-00000.safetensors"
    whole = shard.read_bytes()
    for damaged in (whole[:-100], whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:]):  # cut, and a flipped bit
        shard.write_bytes(damaged)
        said = build()
        assert said.startswith("Built") and "build it again" in said and "moved to" in said
        assert json.loads((first / "index.json").read_text()) == index and shard.read_bytes() == whole
