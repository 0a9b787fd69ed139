"""Checkpoints written while training goes on."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from . import checkpoint as checkpoints
from .checkpoint import Checkpoint

_LOG = logging.getLogger("ref2v")


class BackgroundSaver:
    """Writes the state from a thread of its own, while training goes on until its next update.

    The state on another device is copied to the CPU at once. The CPU's own is written as it lies there, since a copy
    would double what training takes; `before_update` waits until it is written.

    As a context manager it waits for the last checkpoint whatever ends the block. A checkpoint that could not be
    written is a BadInput out of the next `check`, `wait` or `save`, or at the end of the block; where the block ends
    with another exception, that one goes on and the checkpoint's goes to the log.

    Args:
        folder: where the checkpoints are.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._last_step: int | None = None
        self._writes_live = False
        self.seconds = 0.0  # that the last one took, copy and all

    def save(self, checkpoint: Checkpoint, best: int | None = None) -> None:
        """Begin to write a checkpoint; `best` is the step whose checkpoint is kept too. Waits for the one before."""
        self.wait()  # one copy of the state at a time: a slow disk must not fill the memory
        if checkpoint.step == self._last_step:
            return
        self._last_step, began = checkpoint.step, time.monotonic()
        self._writes_live = checkpoint.on_cpu()
        written = checkpoint if self._writes_live else checkpoint.snapshot()
        self._thread = threading.Thread(target=self._write, args=(written, best, began), name="checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raise what the last checkpoint failed with, if it did so by now."""
        if not self.is_writing():
            self.wait()

    def is_writing(self) -> bool:
        """Whether a checkpoint is being written at this moment."""
        return self._thread is not None and self._thread.is_alive()

    def before_update(self) -> None:
        """To be called before anything in the last checkpoint's tensors changes. BadInput as from `wait`."""
        if self._writes_live:
            self.wait()

    def wait(self) -> None:
        """Until the last checkpoint is whole. BadInput where it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error, self._last_step = self._error, None, None
            raise error

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            self.wait()
        except Exception as late:
            if kind is None:
                raise
            _LOG.warning("%s", late)

    def _write(self, checkpoint: Checkpoint, best: int | None, began: float) -> None:
        try:
            checkpoints.save(self.folder, checkpoint, self.keep, best)
            self.seconds = time.monotonic() - began
        except Exception as error:  # raised again where training can hear it
            self._error = error
