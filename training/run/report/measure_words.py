"""What the measures of a report are called wherever a person reads them; report.json keeps the short names."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MEASURES", "Measure", "measure_words", "row_words"]


class Measure(NamedTuple):
    short: str
    unit: str
    more_is_better: bool


MEASURES = {
    "psnr": Measure("PSNR", "dB", True),
    "ssim": Measure("SSIM", "", True),
    "spectrum": Measure("spectrum distance", "", False),
    "relative_residual": Measure("residual left", "base = 1", False),
}


def measure_words(name: str) -> str:
    """"psnr" -> "PSNR (dB, more is better)", as the README says it."""
    measure = MEASURES.get(name)
    if measure is None:
        return name
    remarks = [measure.unit, "more is better" if measure.more_is_better else "less is better"]
    return f"{measure.short} ({', '.join(filter(None, remarks))})"


def row_words(name: str) -> str:
    """The row of a table: "sharpening" -> "best fixed sharpening filter", "8 steps" -> "refiner, 8 steps"."""
    if name == "sharpening":
        return "best fixed sharpening filter"
    return f"refiner, {name}" if name.endswith(("step", "steps")) else name
