"""Checks on what Build Refiner Dataset writes; tests/host/test_dataset_format.py reads the results.

python tests/host/dataset_format_in_host.py HOST_FOLDER RESULT.json CHECKPOINT_FOLDER
"""

import functools
import shutil
import sys
from pathlib import Path

CHECKPOINTS = Path(sys.argv.pop(3))

import in_host  # noqa: E402
from in_host import PACK, error, pack, refusal, write_results  # noqa: E402

# isort: split
import comfy.model_management  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

sys.path += [str(PACK), str(PACK / "tests" / "core" / "data")]  # the host has a package `tests` of its own
from version_1 import as_version_1  # noqa: E402

building = "nodes.host.dataset"
build, BuildRequest = pack(f"{building}.build").build_dataset, pack(f"{building}.request").BuildRequest
sources, host_clip = pack(f"{building}.sources"), pack("nodes.host.clip.host_clip")
RefinerDataset, NodeProgress = pack("training.data.shards").RefinerDataset, pack("nodes.host.progress").NodeProgress
INPUT = Path(in_host.WORK.name) / "input"

with torch.inference_mode():
    MODEL, CLIP, VAE, _ = comfy.sd.load_checkpoint_guess_config(str(CHECKPOINTS / "sd15_min_strided.ckpt"))
    PIXELS = comfy.sd.VAE(sd={"pixel_space_vae": torch.tensor(1.0)})


def pictures(count, width=64, height=64, seed=3):
    return [torch.rand(count, height, width, 3, generator=torch.Generator().manual_seed(seed))]


def built(name, base=None, **inputs):
    """(the result, the dataset that it names)"""
    inputs = {"vae": PIXELS, **({} if "folder" in inputs else {"images": pictures(4)}), **inputs}
    result = build(BuildRequest(base or sources.DegradeBase("resize", 2.0), name, **inputs), NodeProgress(None, 1))
    return result, RefinerDataset.open(result.folder, verify=True) if result.folder else None


def size_on_disk(data, kind):
    return sum(path.stat().st_size for path in data.folder.glob(f"{kind}-*.safetensors"))


def captions_are_stored_once_and_half_precision_where_asked():
    full, data = built("stored", clip=CLIP, caption="a boat")
    half, rounded = built("stored", clip=CLIP, caption="a boat", dtype="float16")
    again, _ = built("stored", clip=CLIP, caption="a boat", dtype="float16")
    return {
        "versions": [data.version, rounded.version],
        "captions": data.pairs.caption_numbers["text_shard"].size,
        "text bytes": [size_on_disk(each, "text") for each in (data, rounded)],
        "latent bytes": [size_on_disk(each, "shard") for each in (data, rounded)],
        "errors": [error(rounded.read(1)[name], data.read(1)[name]) for name in ("z", "b", "context")],
        "folders": [Path(each.folder).name for each in (full, half, again)],
        "said": [each.report for each in (full, half, again)],
    }


def a_dataset_of_version_1_is_found_again():
    result, data = built("old", clip=CLIP, caption="a boat")
    folder, z = data.folder, data.read(2)["z"].clone()
    data.close()
    written = folder.rename(folder.with_name("written"))
    as_version_1(written, folder)
    for name in ("contact_sheet.png", "report.txt"):
        shutil.copy(written / name, folder)
    again, old = built("old", clip=CLIP, caption="a boat")
    return {
        "version": old.version, "folders": [result.folder == again.folder, again.report.split()[0]],
        "same": bool(torch.equal(old.read(2)["z"], z)),
    }  # fmt: skip


class StopsAt(NodeProgress):
    """The progress of a build that is interrupted when it comes to `at`."""

    def __init__(self, at):
        super().__init__(None, 1)
        self.at = at

    def update(self, value, total=None, preview=None):
        super().update(value, total, preview)
        if value == self.at:
            comfy.model_management.interrupt_current_processing(True)


def a_stopped_build_goes_on_with_what_it_had():
    """Nine pictures in shards of two pairs, a stop after the sixth pair, and then the same request once more."""
    writing = pack(f"{building}.writing")
    writer, stopped = writing.DatasetWriter, False
    writing.DatasetWriter = functools.partial(writer, shard_rows=2)
    base, inputs = sources.DegradeBase("blur", 2.0), {"vae": VAE, "images": pictures(9), "clip": CLIP}
    try:
        try:
            build(BuildRequest(base, "stopped", **inputs), StopsAt(9 + 6))
        except comfy.model_management.InterruptProcessingException:
            stopped = True
        left = len(list(Path(in_host.WORK.name).glob("output/refiner_datasets/.stopped*/shard*")))
        result, data = built("stopped", base, **inputs)
        gone_on = data.folder.rename(data.folder.with_name("gone on"))
        _, once = built("stopped", base, **inputs)
    finally:
        writing.DatasetWriter = writer
    files = [path.name for path in once.folder.iterdir()]
    return {
        "stopped": stopped, "shards left": left, "said": result.report, "pairs": len(data.pairs), "files": files,
        "differ": [name for name in files if (gone_on / name).read_bytes() != (once.folder / name).read_bytes()],
    }  # fmt: skip


def a_base_of_its_own_size_is_brought_to_the_targets_grid():
    """The target at 128 x 192, the base at the area of 96 x 96: each by the host's own nodes."""
    import nodes as host_nodes

    conditioning = host_clip.CaptionEncoder(CLIP).conditioning("a boat")
    images = pictures(2, width=192, height=128)
    sampling = conditioning, None, 2, 1.0, "euler", "normal", 0.3, 7
    inputs = {"vae": VAE, "images": images, "max_pixels": 128 * 192}
    results = {}
    for name, size in (("own", (96, 96)), ("target's", (0, 0)), ("larger", (512, 512))):
        result, data = built("sizes", sources.SampleBase(MODEL, *sampling, *size), **inputs)
        results[name] = [[int(data.pairs.numbers[f"base_{side}"][1]) for side in ("height", "width")], data, result]
    target = images[0][1:].movedim(-1, 1)
    small = pack("training.data.buckets").resize(target[0], (64, 128)).movedim(0, -1)[None]
    z = VAE.encode(small)
    b = in_host.sample(MODEL, conditioning, z, negative=conditioning, steps=2, scheduler="normal", denoise=0.3, seed=8)
    (wanted,) = host_nodes.LatentUpscale().upscale({"samples": b}, "bicubic", 192, 128, "disabled")
    made = results["own"][1].read(1)
    return {
        "sizes": {name: found[0] for name, found in results.items()},
        "shape": [list(made["z"].shape), list(made["b"].shape)],
        "error": error(made["b"], MODEL.get_model_object("latent_format").process_in(wanted["samples"][0])),
        "against the target's size": error(made["b"], results["target's"][1].read(1)["b"]),
        "folders": len({found[1].folder for found in results.values()}),
        "index": [found[1].info["base"].get("width") for found in results.values()],
        "said": results["own"][2].report,
        "refused": refusal(lambda: sources.SampleBase(MODEL, *sampling, 96, 0)),
    }


def save(name, pixels):
    """pixels: [H,W,3 or 4], or [H,W] of grey, in [0,1]"""
    path = INPUT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((pixels * 255).round().byte().numpy()).save(path)


def masks_of_files_and_of_opacity_lie_on_the_latents_grid():
    whole = pictures(5, 128, 64)[0]
    left, half = torch.zeros(64, 128), torch.full((64, 128, 1), 0.5)
    left[:, :64] = 1
    save("masks/cut.png", torch.cat([whole[0], left[..., None]], -1))
    save("masks/both.png", torch.cat([whole[1], half], -1))
    save("masks/both_mask.jpg", left)
    save("masks/deep/plain.jpg", whole[2])
    save("masks/deep/plain_mask.png", left[::2, ::2])  # of another size
    save("masks/none.png", whole[3])
    save("masks/turned.png", whole[4])
    save("masks/turned_mask.png", left.T)
    save("masks/black.png", whole[4])
    save("masks/black_mask.png", left * 0)
    save("masks/lonely_mask.png", left)
    inputs = {"folder": INPUT / "masks", "vae": VAE, "mirror": True, "max_pixels": 128 * 64}
    result, data = built("masks", masks=True, **inputs)
    found = {}
    for i, pair in enumerate(data.pairs):
        mask = data.read(i).get("mask")
        row = mask if mask is None else [list(mask.shape), mask[0, 4].tolist()]
        found[f"{pair.source}{' mirrored' * pair.flip}"] = row
    (INPUT / "masks" / "both_mask.jpg").unlink()
    _, other = built("masks", masks=True, **inputs)
    _, without = built("masks", **inputs)
    images = [torch.cat([whole[:1], left[None, :, :, None]], -1)]
    _, batch = built("masks", images=images, masks=True, vae=VAE, max_pixels=128 * 64)
    latents = {"samples": torch.rand(2, 4, 8, 8)}
    return {
        "masks": found, "said": result.report, "folders": len({each.folder for each in (data, other, without)}),
        "pictures without the switch": len({pair.source for pair in without.pairs}), "masked": without.masked,
        "of a batch": batch.read(0)["mask"][0, 4].tolist(),
        "latents": refusal(lambda: built("masks", sources.LatentBase(latents, latents), images=None, masks=True)),
    }  # fmt: skip


def subfolders_have_weights_where_that_is_asked_for():
    for i, picture in enumerate(pictures(4)[0]):
        save(("10_fox/a.png", "10_fox/deep/b.png", "2_hare/c.png", "d.png")[i], picture)
    inputs = {"folder": INPUT, "vae": PIXELS}
    shutil.rmtree(INPUT / "masks", ignore_errors=True)
    result, data = built("subsets", subset_weights=True, **inputs)
    _, plain = built("subsets", **inputs)
    return {
        "weights": data.info["subsets"], "subsets": {pair.source: pair.subset for pair in data.pairs},
        "said": [line.strip() for line in result.report.splitlines() if line.startswith("Subsets")],
        "plain": [plain.info["subsets"], plain.folder != data.folder],
        "none": refusal(lambda: built("subsets", subset_weights=True, folder=INPUT / "10_fox")),
    }  # fmt: skip


def pictures_at_several_resolutions():
    images = [*pictures(2, 256, 128), *pictures(1, 64, 64)]
    request, degrade = pack(f"{building}.request"), sources.DegradeBase("resize", 2.0)
    result, data = built("several", degrade, images=images, vae=VAE, resolutions=(64, 128), mirror=True, held_out=1)
    _, single = built("several", degrade, images=images, vae=VAE, max_pixels=128 * 128)
    wanted = {pair.source: single.read(i)["z"] / single.latent["scale"] for i, pair in enumerate(single.pairs)}
    sides = {}
    for i, pair in enumerate(data.pairs):
        sides.setdefault(pair.source, set()).add(pair.split)
        if not pair.flip and (pair.height, pair.width) == tuple(wanted[pair.source].shape[1:]):
            z, shifts = data.read(i)["z"] / data.latent["scale"], data.latent["shift"] - single.latent["shift"]
            wanted[pair.source] = error(z + shifts, wanted[pair.source])
    return {
        "pairs": [[pair.source, pair.height, pair.width, pair.flip] for pair in data.pairs],
        "sides": {name: len(found) for name, found in sides.items()}, "held out": len(data.held_out),
        "errors": list(wanted.values()), "said": result.report,
        "parsed": [request.parse_resolutions(text) for text in ("768, 512,768", " ")],
        "refused": [refusal(lambda text=text: request.parse_resolutions(text)) for text in ("big", "32", "512,")],
    }  # fmt: skip


CHECKS = (
    captions_are_stored_once_and_half_precision_where_asked,
    a_dataset_of_version_1_is_found_again,
    a_stopped_build_goes_on_with_what_it_had,
    a_base_of_its_own_size_is_brought_to_the_targets_grid,
    masks_of_files_and_of_opacity_lie_on_the_latents_grid,
    subfolders_have_weights_where_that_is_asked_for,
    pictures_at_several_resolutions,
)
write_results({check.__name__: check for check in CHECKS})
