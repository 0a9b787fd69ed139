"""What the nodes that select a dtype ask and show alike."""

from __future__ import annotations

from typing import Any

from ...training.precision.dtypes import COMPUTE, DTYPES
from ...training.precision.resolve import AUTO, DEFAULT
from ..host.api import io, ui
from ..host.schema import declare

__all__ = ["compute_input", "report_output", "selected_output", "storage_input"]


def compute_input(name: str, tooltip: str) -> Any:
    """A dtype to compute in."""
    return declare(io.Combo.Input, name, options=[DEFAULT, *COMPUTE, AUTO], default=DEFAULT, tooltip=tooltip)


def storage_input(tooltip: str) -> Any:
    """A dtype to store the weights in."""
    return declare(io.Combo.Input, "storage", options=[DEFAULT, *DTYPES], default=DEFAULT, tooltip=tooltip)


def report_output(tooltip: str) -> Any:
    return declare(io.String.Output, "report", display_name="report", tooltip=tooltip)


def selected_output(made: Any, report: str) -> io.NodeOutput:
    """A VAE, CLIP or MODEL and its report, which is shown on the node too."""
    return io.NodeOutput(made, report, ui=ui.PreviewText(report).as_dict())
