"""What the measures of a report are called wherever a person reads them; report.json keeps the short names."""

from __future__ import annotations

__all__ = ["MEASURES", "measure_words", "row_words"]

# name in report.json -> (words, whether more is better)
MEASURES = {
    "psnr": ("PSNR (dB, more is better)", True),
    "ssim": ("SSIM (more is better)", True),
    "spectrum": ("spectrum distance (less is better)", False),
    "relative_residual": ("residual left (base = 1, less is better)", False),
}


def measure_words(name: str) -> str:
    return MEASURES[name][0] if name in MEASURES else name


def row_words(name: str) -> str:
    """"base", "sharpening", "8 steps" -> as the README says it."""
    if name == "sharpening":
        return "best fixed sharpening filter"
    return f"refiner, {name}" if name.endswith(("step", "steps")) else name
