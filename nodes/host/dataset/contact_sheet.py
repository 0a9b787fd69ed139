"""A few pairs as one picture, base beside target: what a person looks at before a long build."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageDraw

from ....training.data.pictures import to_uint8

__all__ = ["as_image", "contact_sheet", "false_colours"]

_CELL = 256  # longest side of a picture on the sheet
_LINE = 16  # height of a line of text
_GAP = 4
_COLUMNS = 2  # pairs side by side


def contact_sheet(pairs: list[tuple[str, torch.Tensor, torch.Tensor]]) -> Image.Image:
    """(name, base [3,H,W], target [3,H,W] in [0,1]) -> one RGB picture with a line of text over each pair."""
    cells = [_pair(name, base, target) for name, base, target in pairs]
    rows = [cells[i : i + _COLUMNS] for i in range(0, len(cells), _COLUMNS)]
    widths = [max(row[column].width for row in rows if column < len(row)) for column in range(len(rows[0]))]
    sheet = Image.new("RGB", (sum(widths) + _GAP * (len(widths) - 1), sum(max(c.height for c in r) for r in rows)))
    y = 0
    for row in rows:
        x = 0
        for cell, width in zip(row, widths, strict=False):
            sheet.paste(cell, (x, y))
            x += width + _GAP
        y += max(cell.height for cell in row)
    return sheet


def false_colours(latent: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[C,h,w] -> [3,h,w] in [0,1]: the first three channels, spread as those of `like` are; without a VAE, no more."""
    three = [min(i, len(like) - 1) for i in range(3)]
    like, latent = like[three].flatten(1), latent[three]
    low = like.quantile(0.01, dim=1)[:, None, None]
    high = like.quantile(0.99, dim=1)[:, None, None]
    return ((latent - low) / (high - low).clamp_min(1e-6)).clamp(0, 1)


def _pair(name: str, base: torch.Tensor, target: torch.Tensor) -> Image.Image:
    height, width = target.shape[1:]
    scale = min(1.0, _CELL / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    cell = Image.new("RGB", (max(2 * size[0] + _GAP, 160), size[1] + 2 * _LINE), (24, 24, 24))
    draw = ImageDraw.Draw(cell)
    # The default font may lack other scripts, and on some builds of PIL refuses them.
    draw.text((2, 2), f"{name.encode('ascii', 'replace').decode()}  {width}x{height}", fill=(220, 220, 220))
    draw.text((2, _LINE), "base", fill=(160, 160, 160))
    draw.text((size[0] + _GAP + 2, _LINE), "target", fill=(160, 160, 160))
    for i, picture in enumerate((base, target)):
        cell.paste(Image.fromarray(to_uint8(picture)).resize(size), (i * (size[0] + _GAP), 2 * _LINE))
    return cell


def as_image(sheet: Image.Image) -> torch.Tensor:
    """PIL RGB -> IMAGE [1,H,W,3] float32 in [0,1]."""
    return torch.from_numpy(np.array(sheet.convert("RGB"))).float()[None] / 255
