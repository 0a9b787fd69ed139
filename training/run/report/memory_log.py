"""Memory and speed over the steps of a run: files of their own, since the journal must not depend on the machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from ...storage.files import write_whole
from .journal import read

__all__ = ["MemoryLog"]


class MemoryLog:
    """Appends what `measure` gives ({name: number}) to `<run>/memory.jsonl`, about `POINTS` times a run.

    On resume the lines after the resumed step are dropped, as in the journal.
    """

    POINTS = 200

    def __init__(
        self,
        folder: Path,
        resume_step: int,
        total: int,
        measure: Callable[[], Mapping[str, float]],
        name: str = "memory.jsonl",
    ):
        self.path, self.measure = folder / name, measure
        self.every = max(1, total // self.POINTS)
        self.lines = [line for line in read(self.path) if line["step"] <= resume_step]
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))

    def look(self, step: int) -> None:
        """After each step; `step` is its absolute number. OSError where the line cannot be written."""
        if step % self.every:
            return
        measured = self.measure()
        if measured:
            line = {"step": step, **measured}
            self.lines.append(line)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def series(self) -> dict[str, tuple[list[int], list[int]]]:
        """{name: (steps, bytes)}."""
        names = dict.fromkeys(name for line in self.lines for name in line if name != "step")
        each = {name: [line for line in self.lines if name in line] for name in names}
        return {
            name: ([line["step"] for line in lines], [line[name] for line in lines]) for name, lines in each.items()
        }
