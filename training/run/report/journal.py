"""The run's diary: one JSON line a step, and the same numbers for TensorBoard."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ...storage.files import write_whole


class Journal:
    """Appends to `<run>/metrics.jsonl` and, where the package tensorboard works, to `<run>/tensorboard/`.

    without_board: why there is no `tensorboard/`, or "". metrics.jsonl is whole either way.

    On resume the lines after the resumed step are dropped, so that the file reads like one uninterrupted run.
    """

    def __init__(self, folder: Path, resume_step: int):
        self.path = folder / "metrics.jsonl"
        self.lines: list[dict[str, Any]] = [line for line in read(self.path) if line["step"] <= resume_step]
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))
        self._file = open(self.path, "a")  # noqa: SIM115 open as long as the run
        self._board, self.without_board = _open_board(folder / "tensorboard", resume_step + 1)

    def write(self, step: int, **values: float) -> None:
        # JSON knows no infinity: the gradient norm of a step that fp16 skipped becomes null
        line = {"step": step, **{name: v if math.isfinite(v) else None for name, v in values.items()}}
        self.lines.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def has(self, step: int, name: str) -> bool:
        """Whether a quantity was written at a step."""
        return any(name in line for line in reversed(self.lines) if line["step"] == step)

    def position(self) -> dict[str, int]:
        """How much is written by now, and on the disk: a checkpoint says so, and a gap shows on resume."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"lines": len(self.lines)}

    def best(self, name: str) -> int | None:
        """The step at which a quantity was lowest, the first of equals; None where it was never written."""
        at = lowest(self.lines, name)
        return at and at[0]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of one quantity."""
        return _series(self.lines, name)

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            if self._board is not None:
                self._board.close()


def _open_board(folder: Path, first_step: int) -> tuple[Any, str]:
    """(TensorBoard's writer, "") or (None, why there is none)."""
    # tensorboard alone takes about a second to import; nobody who only samples should pay for it
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        if error.name not in ("tensorboard", None):
            return None, f"No files for TensorBoard: it needs the package {error.name}, which is not installed."
        return None, "No files for TensorBoard: the package tensorboard is not installed. metrics.jsonl has it all."
    except Exception as error:  # a protobuf or numpy that it does not fit raises AttributeError, TypeError, ...
        words = (str(error).splitlines() or [""])[0][:200]
        return None, f"No files for TensorBoard: the package tensorboard is broken ({type(error).__name__}: {words})."
    return SummaryWriter(str(folder), purge_step=first_step), ""


def _series(lines: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def lowest(lines: list[dict[str, Any]], name: str) -> tuple[int, float] | None:
    """(step, value) at which a quantity was lowest, the first of equals; None where it was never written."""
    steps, values = _series(lines, name)
    return (steps[values.index(min(values))], min(values)) if steps else None


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            lines.append({**line, "step": int(line["step"])})
        except (ValueError, KeyError, TypeError):
            break
    return lines
