"""What a long node shows while it works, and how it notices that the user wants it to stop."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, NoReturn

import comfy.model_management
import comfy.utils
import torch

from .wording import for_people

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "CANCELLED",
    "NOT_A_FAILURE",
    "NodeProgress",
    "interrupted",
    "raise_if_interrupted",
    "show_text",
    "stop_as_interrupted",
]

_LOG = logging.getLogger("ref2v")
# How the host ends a node that was cancelled: an ordinary exception in some versions. In one that has renamed it, a
# Cancel is told as a failure, and the nodes work.
CANCELLED = getattr(comfy.model_management, "InterruptProcessingException", KeyboardInterrupt)
# What says nothing about the model at work: a Cancel, and memory that runs out, to which the host has answers.
NOT_A_FAILURE = (CANCELLED, getattr(comfy.model_management, "OOM_EXCEPTION", torch.cuda.OutOfMemoryError))
_PREVIEW_PIXELS = 512  # longest side of a preview picture; the host shrinks what is larger
_SECONDS_BETWEEN_UPDATES = 0.1  # a fast loop would otherwise send hundreds of websocket messages a second


def interrupted() -> bool:
    """Whether the user pressed stop. Only looks: the host's own check takes the request away with it."""
    return comfy.model_management.processing_interrupted()


def raise_if_interrupted() -> None:
    """End the node as the host does it, if the user pressed stop. Nothing may catch this but `finally`.

    The host's exception is an `Exception` in some versions and a bare `BaseException` in others.
    """
    comfy.model_management.throw_exception_if_processing_interrupted()


def stop_as_interrupted() -> NoReturn:
    """End the node as the host does it, whoever took the request away meanwhile."""
    raise_if_interrupted()
    raise CANCELLED


def show_text(node_id: str | None, line: str) -> None:
    """Show a line of text on a node, which may have finished. It replaces the one before."""
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    if server is not None and node_id is not None:
        server.send_progress_text(for_people(line), node_id, server.client_id)


class NodeProgress:
    """The progress bar, preview picture and text line of one node run.

    `node_id`: `cls.hidden.unique_id` (declare `hidden=[io.Hidden.unique_id]`), or None outside a graph.
    `total`: number of units of work. Use it from the node's own thread.

    An update never raises the host's interruption, not even one that comes while it is sent (the host's own hook looks
    for it): what runs must get the chance to leave its files whole. So poll `interrupted()` once a unit, leave the
    loop, and then call `raise_if_interrupted()`.
    """

    def __init__(self, node_id: str | None, total: int) -> None:
        self.node_id = node_id
        self.total = max(int(total), 1)
        self.value = 0
        self._bar = comfy.utils.ProgressBar(self.total, node_id=node_id)
        self._last_sent = float("-inf")

    def update(self, value: int, total: int | None = None, preview: Image.Image | None = None) -> None:
        """Set the bar to `value` of `total` units, with a preview picture if there is a new one."""
        self.value = value
        if total is not None:
            self.total = max(int(total), 1)
        now = time.monotonic()
        due = now - self._last_sent >= _SECONDS_BETWEEN_UPDATES or value >= self.total
        if interrupted() or not (due or preview is not None):
            return
        self._last_sent = now
        picture = None if preview is None else ("JPEG", preview.convert("RGB"), _PREVIEW_PIXELS)
        try:
            self._bar.update_absolute(min(value, self.total), self.total, picture)
        except CANCELLED:
            # the hook took the request away with it; whoever polls must still find it
            comfy.model_management.interrupt_current_processing()

    def advance(self, units: int = 1, preview: Image.Image | None = None) -> None:
        """Move the bar on by `units`."""
        self.update(self.value + units, preview=preview)

    def text(self, line: str) -> None:
        """Show a line of text on the node (time left, what is being done). It replaces the one before."""
        show_text(self.node_id, line)

    def message(self, line: str) -> None:
        """A line worth keeping: on the node, and in the host's log."""
        _LOG.info(line)
        self.text(line)
