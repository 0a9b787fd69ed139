"""What the memory nodes ask and show alike."""

from __future__ import annotations

from typing import Any

from ...training.memory.attention import BACKENDS
from ...training.memory.estimate import CUSTOM, SIZES
from ...training.memory.models import LARGEST_SIDE
from ..host.absent import absent
from ..host.api import io, ui
from ..host.schema import Node, declare

__all__ = [
    "MemoryNode",
    "attention_inputs",
    "batch_inputs",
    "chart_and_report",
    "fitting_size",
    "memory_input",
    "number_output",
    "shown",
    "size_inputs",
]


class MemoryNode(Node):
    """A node that asks this machine what is free."""

    @classmethod
    def fingerprint_inputs(cls, memory_gib: float | None = None, **constants: Any) -> str:
        from ..host.memory.estimate import memory_fingerprint

        return memory_fingerprint(memory_gib)


def size_inputs() -> list[Any]:
    return [
        declare(
            io.Combo.Input,
            "size",
            options=[*SIZES, CUSTOM],
            default="768x768",
            tooltip="Width and height of the picture in pixels; custom takes the two numbers below.",
        ),
        declare(io.Int.Input, "width", default=768, min=1, max=LARGEST_SIDE, tooltip="Pixels, with size on custom."),
        declare(io.Int.Input, "height", default=768, min=1, max=LARGEST_SIDE, tooltip="Pixels, with size on custom."),
    ]


def batch_inputs() -> list[Any]:
    return [
        declare(io.Int.Input, "batch_size", default=1, min=1, max=4096, tooltip="Pictures at once."),
        declare(
            io.Int.Input,
            "frames",
            default=1,
            min=1,
            max=4096,
            tooltip="Of a clip. Picture models take each frame as one more picture of the batch.",
        ),
    ]


def attention_inputs() -> list[Any]:
    return [
        declare(
            io.Combo.Input,
            "backend",
            options=["auto", *BACKENDS],
            default="auto",
            tooltip="How attention is computed. auto: what this ComfyUI uses.",
        ),
        declare(
            io.Boolean.Input,
            "cfg",
            default=True,
            tooltip="Positive and negative go through the network in one batch, as the host does where memory "
            "allows it. Off for cfg 1.",
        ),
        declare(
            io.Int.Input,
            "text_tokens",
            default=0,
            min=0,
            max=100000,
            tooltip="Tokens of the prompt; 0 for the usual number of the network.",
            advanced=True,
        ),
    ]


def memory_input() -> Any:
    return declare(
        io.Float.Input,
        "memory_gib",
        default=0.0,
        min=0.0,
        max=65536.0,
        step=0.5,
        tooltip="Plan for an empty GPU of so many GiB; 0 asks this machine what is free now.",
    )


def chart_and_report(tooltip: str) -> list[Any]:
    """Their outputs; `tooltip` of the chart."""
    return [
        declare(io.Image.Output, "chart", display_name="chart", tooltip=tooltip),
        declare(io.String.Output, "report", display_name="report", tooltip="The verdict and the whole table."),
    ]


def number_output(name: str, tooltip: str) -> Any:
    return declare(io.Int.Output, name, display_name=name, tooltip=tooltip)


def fitting_size(tooltip: str) -> list[Any]:
    """The outputs of a width and a height that fit; `tooltip` of the width."""
    return [
        number_output("fitting_width", tooltip),
        number_output("fitting_height", "The height that belongs to fitting_width."),
    ]


def shown(node: type, estimate: Any, *numbers: int, chart: Any = None) -> io.NodeOutput:
    """The chart (columns side by side by default) and the report, as outputs and on the node, then the numbers.

    Where nothing fits, the size or number that would is no 0 to go on with: a node behind it is not run, and says why.
    """
    from ..host.memory.estimate import columns_image

    chart = columns_image(estimate) if chart is None else chart
    report = estimate.report()
    on_node = {**ui.PreviewImage(chart, cls=node).as_dict(), **ui.PreviewText(report).as_dict()}
    none = "There is no number to give here: nothing of the kind fits into the memory, or the model makes no clips."
    outputs = [number or absent(none) for number in numbers]
    return io.NodeOutput(chart, report, *outputs, ui=on_node)
