"""Words for people: what the measures of a report are called (report.json keeps the short names), and durations."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MEASURES", "Measure", "duration", "measure_label", "row_label"]


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


def measure_label(name: str) -> str:
    """"psnr" -> "PSNR (dB, more is better)", as the README says it."""
    measure = MEASURES.get(name)
    if measure is None:
        return name
    remarks = [measure.unit, "more is better" if measure.more_is_better else "less is better"]
    return f"{measure.short} ({', '.join(filter(None, remarks))})"


def row_label(name: str) -> str:
    """The row of a table: "sharpening" -> "best fixed sharpening filter", "8 steps" -> "refiner, 8 steps"."""
    if name == "sharpening":
        return "best fixed sharpening filter"
    return f"refiner, {name}" if name.endswith(("step", "steps")) else name


def duration(seconds: float) -> str:
    """8.24 -> "8.2 s", 75 -> "1 min 15 s", 3700 -> "1 h 1 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
