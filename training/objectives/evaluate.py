"""Held-out pairs, measured: base against refined against target, for several numbers of steps.

In pixel space the measures are those of pictures (PSNR, SSIM, radial spectrum), beside the best fixed sharpening
filter. In a latent space a picture needs the VAE, which the core does not have; there the relative residual is
measured, and the pictures are the dataset's linear preview.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..data import metrics
from ..data.batches import crop_size
from ..data.shards import RefinerDataset
from .residual import flow

if TYPE_CHECKING:
    from ..config.train_config import TrainConfig

STEP_COUNTS = (1, 2, 4, 8)
FILTER_SIZE = 9
FLOAT32 = 2
"""Version of how held-out pairs are measured. 1: in the precision of the run, and SDXL's sizes were those of the whole
pair."""
FILTER_PAIRS, FILTER_CROP = 200, 256  # enough for 81 numbers, and a bound on the memory of the fit


class AtWork(Protocol):
    """A network that is measured: training/objectives/residual/model.py, training/objectives/sdxl_refiner/model.py."""

    def remembering(self) -> AtWork:
        """The same network, which is not asked twice at the state where all of a pair's walks begin."""

    def refine(self, b: Tensor, e: Tensor, condition: dict[str, Tensor], times: Tensor) -> Tensor: ...
    def loss_at(
        self, z: Tensor, b: Tensor, e: Tensor, condition: dict[str, Tensor], times: Sequence[float]
    ) -> list[float]: ...


@dataclass
class Evaluation:
    rows: dict[str, dict[str, float]]  # "base", "sharpening", "1 step", ... -> measure -> mean over the pairs
    loss_per_sigma: dict[str, float]
    pictures: list[dict[str, Tensor]] = field(repr=False)  # per pair: base, refined, target as [3, h, w] in [0, 1]

    @property
    def loss(self) -> float:
        """Mean over the sigmas."""
        return sum(self.loss_per_sigma.values()) / len(self.loss_per_sigma)

    @property
    def count(self) -> int:
        return len(self.pictures)

    def as_json(self) -> dict[str, Any]:
        return {"pairs": self.count, "measures": self.rows, "loss_per_sigma": self.loss_per_sigma}


def is_pixel_space(data: RefinerDataset) -> bool:
    return data.latent["channels"] == 3 and data.latent["downscale"] == 1


def to_picture(latent: Tensor, preview: dict[str, Any] | None) -> Tensor:
    """[C, h, w] in model space -> [3, h, w] in [0, 1]; without a preview map the latent is RGB in [-1, 1] already."""
    rgb = latent.float()
    if preview is not None:
        weight, bias = torch.tensor(preview["weight"]), torch.tensor(preview["bias"])
        rgb = torch.einsum("chw,ck->khw", rgb, weight) + bias[:, None, None]
    elif len(rgb) != 3:  # latents that came without pictures: their mean in grey, model space being about +-1
        rgb = rgb.mean(0, keepdim=True).expand(3, -1, -1)
    return (rgb / 2 + 0.5).clamp(0, 1)


def centre_crop(pair: dict[str, Tensor], side: int | None) -> tuple[Tensor, Tensor]:
    """(z, b) of a pair, both [C, h, w], cropped to the centre; smaller pairs stay whole."""
    height, width = pair["z"].shape[-2:]
    h, w = min(side or height, height), min(side or width, width)
    top, left = (height - h) // 2, (width - w) // 2
    return tuple(pair[name][:, top : top + h, left : left + w].contiguous() for name in ("z", "b"))  # type: ignore


def condition_of(
    data: RefinerDataset,
    pairs: Sequence[dict[str, Tensor]],
    sizes: Sequence[tuple[int, int]],
    empty: dict[str, Tensor],
    device,
) -> dict[str, Tensor]:
    """The conditioning of a batch of pairs. sizes: (height, width) in latent cells that the network is told of each,
    as in training: those of what it is shown."""
    kinds = ("context", "pooled") if "pooled" in empty else ("context",)
    condition = {kind: torch.stack([pair.get(kind, empty[kind]) for pair in pairs]).to(device) for kind in kinds}
    if "pooled" in empty:
        pixels = [[side * data.latent["downscale"] for side in size] for size in sizes]
        told = [[height, width, 0, 0, height, width] for height, width in pixels]
        condition["time_ids"] = torch.tensor(told, dtype=torch.float32, device=device)
    return condition


def cells_of_a_batch(config: TrainConfig, data: RefinerDataset) -> int:
    """Latent cells of the largest batch that the run trains on: so many can be measured at once in less memory."""
    sizes = [crop_size(data.pairs[index], config.data.crop) for index in data.train]
    return config.data.batch_size * max((height * width for height, width in sizes), default=1)


def batches_of(data: RefinerDataset, indices: Sequence[int], crop: int | None, cells: int) -> Iterator[list[int]]:
    """`indices` in their order, those that follow each other and have one size after the crop together, at most `cells`
    latent cells at once."""
    for (height, width), alike in groupby(indices, key=lambda index: crop_size(data.pairs[index], crop)):
        together, rest = max(1, cells // (height * width)), list(alike)
        yield from (rest[start : start + together] for start in range(0, len(rest), together))


def evaluate(
    refiner: AtWork,
    data: RefinerDataset,
    indices: Sequence[int],
    empty: dict[str, Tensor],
    *,
    sigmas: Sequence[float],
    crop: int | None,
    seed: int,
    device: torch.device,
    step_counts: Sequence[int] = STEP_COUNTS,
    times_of: Callable[[int], Tensor] = flow.sigmas,
    shown_steps: int = 8,
    sharpening: bool = True,
    cells: int = 0,
    told_whole: bool = False,
    on_pair: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Mean measures over the pairs `indices`. The noise of pair k is a function of (seed, k), whatever the device.

    times_of: the sampling times of so many steps, the final 0 included.
    step_counts: none measures the loss alone.
    cells: latent cells that are measured at once, where pairs of one size follow each other; at least one pair.
    told_whole: tell an SDXL-like network the size of the whole pair instead of the crop's.
    on_pair: told (pairs done, of how many).
    """
    pixel = is_pixel_space(data)
    on_pair(0, len(indices))
    kernel = fit_sharpening(data, crop) if pixel and sharpening else None
    totals: dict[str, dict[str, float]] = {}
    losses = [0.0] * len(sigmas)
    pictures: list[dict[str, Tensor]] = []
    done, preview = 0, data.info.get("preview")
    for batch in batches_of(data, indices, crop, cells):
        if should_stop():
            break
        pairs = [data.read(index) for index in batch]
        cropped = [centre_crop(pair, crop) for pair in pairs]
        z, b = (torch.stack(tensors) for tensors in zip(*cropped, strict=True))
        e = torch.stack([
            torch.randn(z.shape[1:], generator=torch.Generator().manual_seed(seed + index)) for index in batch
        ])  # fmt: skip
        sizes: Any = [(pair["z"] if told_whole else z).shape[-2:] for pair in pairs]
        condition = condition_of(data, pairs, sizes, empty, device)
        z_there, b_there, e_there = (tensor.to(device) for tensor in (z, b, e))
        once = refiner.remembering()
        walked = {steps: once.refine(b_there, e_there, condition, times_of(steps)).cpu() for steps in step_counts}
        for k, loss in enumerate(once.loss_at(z_there, b_there, e_there, condition, sigmas)):
            losses[k] += loss * len(batch)
        for i in range(len(batch)) if step_counts else ():
            answers = {"base": b[i]}
            if kernel is not None:
                answers["sharpening"] = sharpen(b[i], kernel)
            answers |= {f"{steps} step{'s' if steps > 1 else ''}": walked[steps][i] for steps in step_counts}
            for name, answer in answers.items():
                for measure, value in _measure(answer, z[i], b[i], pixel).items():
                    row = totals.setdefault(name, {})
                    row[measure] = row.get(measure, 0.0) + value
            shown = walked[shown_steps if shown_steps in walked else step_counts[-1]][i]
            three = {"base": b[i], "refined": shown, "target": z[i]}
            pictures.append({name: to_picture(latent, preview) for name, latent in three.items()})
        done += len(batch)
        on_pair(done, len(indices))
    count = max(done, 1)
    rows = {name: {m: v / count for m, v in row.items()} for name, row in totals.items()}
    per_sigma = {f"{t:g}": loss / count for t, loss in zip(sigmas, losses, strict=True)}
    return Evaluation(rows, per_sigma, pictures)


def _measure(answer: Tensor, z: Tensor, b: Tensor, pixel: bool) -> dict[str, float]:
    measures = {
        # 1 = no better than the base, 0 = the target
        "relative_residual": _rms(answer - z) / max(_rms(b - z), 1e-12),
        "spectrum": metrics.spectrum_distance(answer, z),
    }
    if pixel:
        picture, target = to_picture(answer, None), to_picture(z, None)
        measures["psnr"] = metrics.psnr(picture, target)
        measures["ssim"] = metrics.ssim(picture, target)
        measures["spectrum"] = metrics.spectrum_distance(picture, target)
    return measures


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def fit_sharpening(data: RefinerDataset, crop: int | None, size: int = FILTER_SIZE) -> Tensor:
    """The best fixed `size` x `size` filter: least squares from base to target over training pairs. [size, size]

    No fixed linear filter of that size can do better on them (Wiener's filter, in its empirical form), so what a
    refiner gains beyond it is not mere sharpening.
    """
    gram = torch.zeros(size * size, size * size, dtype=torch.float64)
    cross = torch.zeros(size * size, dtype=torch.float64)
    for index in data.train[:: math.ceil(len(data.train) / FILTER_PAIRS)]:
        z, b = centre_crop(data.read(index), min(crop or FILTER_CROP, FILTER_CROP))
        windows = functional.unfold(_padded(b, size)[:, None], size).double()  # [3, size^2, h w]
        gram += torch.einsum("cin,cjn->ij", windows, windows)
        cross += torch.einsum("cin,cn->i", windows, z.flatten(1).double())
    ridge = 1e-9 * gram.diagonal().mean() * torch.eye(size * size, dtype=torch.float64)
    return torch.linalg.solve(gram + ridge, cross).float().reshape(size, size)


def sharpen(b: Tensor, kernel: Tensor) -> Tensor:
    """The filter of fit_sharpening on a [C, h, w] picture, borders reflected."""
    return functional.conv2d(_padded(b, kernel.shape[-1])[:, None], kernel[None, None])[:, 0]


def _padded(b: Tensor, size: int) -> Tensor:
    return functional.pad(b, (size // 2,) * 4, mode="reflect")
