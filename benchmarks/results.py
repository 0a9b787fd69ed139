"""How every benchmark reports: ratios of interleaved repetitions, a section of RESULTS.md each, the machine named."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable, Sequence
from math import comb, inf
from pathlib import Path
from statistics import median

import torch

RESULTS = Path(__file__).with_name("RESULTS.md")


def spread(values: Sequence[float], digits: int = 3) -> str:
    """ "median (min..max)" of the repetitions."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, free of any assumption about how the values are spread.

    By order statistics: the narrowest two of the sorted values between which the true median lies in at least 95 of
    100 such series (David & Nagaraja 2003, 7.1). The ends are infinite where there are fewer than six values.
    """
    ordered, count = sorted(values), len(values)
    below, outside = 0, 0.5**count  # P(at most `below` of the values lie under the median)
    while outside <= 0.025:
        below += 1
        outside += comb(count, below) * 0.5**count
    if below == 0:
        return -inf, inf
    return ordered[below - 1], ordered[count - below]


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; every column but the first is aligned to the right."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def machine() -> str:
    """What the figures were measured on, in one line."""
    memory = ""
    if hasattr(os, "sysconf"):
        memory = f" {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB memory,"
    return (
        f"Machine: {os.cpu_count()} cores, {_processor()},{memory} {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{datetime.date.today().isoformat()}."
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    first = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    number = f" (family {first['cpu family']}, model {first['model']})" if "cpu family" in first else ""
    return first.get("model name", platform.machine()) + number


def report(section: str, body: str, *, write: bool, path: Path = RESULTS) -> None:
    """Print `body`; with `write` also put it between the section's two comments in RESULTS.md."""
    print(f"\n{body}")
    if write:
        write_section(section, body, path)
        print(f"\nWritten to {path}, section {section!r}.")


def write_section(section: str, body: str, path: Path) -> None:
    """Replace what stands between `<!-- begin: section -->` and `<!-- end: section -->`; append it where none is."""
    begin, end = f"<!-- begin: {section} -->", f"<!-- end: {section} -->"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    new = f"{begin}\n{body.strip()}\n{end}"
    if begin in text and end in text:
        before, _, rest = text.partition(begin)
        text = before + new + rest.partition(end)[2]
    else:
        text = f"{text.rstrip()}\n\n{new}\n".lstrip()
    beside = path.with_name(path.name + ".partial")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
