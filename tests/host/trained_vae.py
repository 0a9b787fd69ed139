"""A VAE of the host's own class that has learnt a little, so that what it decodes is a picture and not noise.

TAESD (2.4 M parameters). From noise it would take an hour to learn colours. So it starts as one that hands them through
at an eighth of the size, blurred, on three of its 64 channels, the others at random, and is then trained on crops of
the template pictures for about half a minute. The weights are kept in .dev between sessions. Imported by scripts that
run beside the host.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

STEPS, CROP, BORDER, PICTURES = 40, 64, 16, 48
_BLUR = torch.tensor([1.0, 2.0, 1.0]) / 4
KEPT = Path(__file__).resolve().parents[2] / ".dev" / "trained_vae"


def template_pictures(count: int, side: int) -> list[torch.Tensor]:
    """Real pictures, those of the host's template browser, as [3, side, side] in [0, 1]; no line drawings."""
    import comfyui_workflow_templates_media_image as package
    import numpy
    from PIL import Image

    found = []
    for path in sorted((Path(package.__file__).parent / "templates").glob("*.webp")):
        with Image.open(path) as picture:
            if getattr(picture, "is_animated", False) or min(picture.size) < 256:
                continue
            square = picture.convert("RGB").crop((0, 0, min(picture.size), min(picture.size)))
            square = square.resize((side, side), Image.Resampling.LANCZOS)
        array = numpy.asarray(square, dtype=numpy.float32) / 255
        if array.std() > 0.15:
            found.append(torch.from_numpy(array).movedim(-1, 0))
        if len(found) == count:
            return found
    raise AssertionError(f"The template package has only {len(found)} still pictures.")


def trained_vae() -> dict[str, torch.Tensor]:
    """Its state dict, as a file of models/vae holds it."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    path = KEPT / f"{recipe}.safetensors"
    if not path.is_file():
        KEPT.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        save_file(_train(), partial)
        os.replace(partial, path)
    return load_file(path)


def _train() -> dict[str, torch.Tensor]:
    import comfy.taesd.taesd

    with torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(0)
        vae = comfy.taesd.taesd.TAESD()
        for layer in vae.modules():
            if isinstance(layer, torch.nn.Conv2d):
                torch.nn.Conv2d.reset_parameters(layer)  # the host's layers leave their weights as they find them
        for half in (vae.taesd_encoder, vae.taesd_decoder):
            _hand_colours_through(half)
        pictures = torch.stack(template_pictures(PICTURES + 1, 128)[1:])  # the first is kept for the tests
        optimizer = torch.optim.Adam(vae.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-4, STEPS)
        for _ in range(STEPS):
            which = torch.randint(len(pictures), (1,))
            top, left = torch.randint(128 - CROP + 1, (2,)).tolist()
            pixels = pictures[which, :, top : top + CROP, left : left + CROP] * 2 - 1
            wrong = (vae.decode(vae.encode(pixels)) - pixels).abs()
            # the padding darkens the border of a crop this small, and a whole picture has little border
            loss = wrong[..., BORDER:-BORDER, BORDER:-BORDER].mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return {key: value.detach().contiguous().clone() for key, value in vae.state_dict().items()}


@torch.no_grad()
def _hand_colours_through(half: torch.nn.Sequential) -> None:
    """Blurred by each layer between the blocks; the blocks add nothing to these three channels yet."""
    for layer in half:
        conv = layer.conv[-1] if hasattr(layer, "skip") else layer
        if isinstance(conv, torch.nn.Conv2d):
            conv.weight[:3] = 0
            if conv.bias is not None:
                conv.bias[:3] = 0
            for channel in range(3 * (conv is layer)):
                conv.weight[channel, channel] = torch.outer(_BLUR, _BLUR)
