"""What attention allocates at a size, per layer and backend."""

from __future__ import annotations

from typing import Any

from ...training.memory.estimate import DTYPES
from ...training.memory.models import PRESETS
from ..host.api import io, loading
from ..host.schema import declare, node_schema
from .shared_inputs import attention_inputs, batch_inputs, memory_input, shown, size_inputs

__all__ = ["NODES"]


class Ref2VEstimateAttentionMemory(io.ComfyNode):
    """Says what attention will need at a size, before anything runs: per layer, and on every attention backend side by
    side.

    Only attention, weights and the latent are counted; the report says what is not. Nothing is loaded or computed.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VEstimateAttentionMemory",
            display_name="Attention Memory",
            category="Ref2V/Memory",
            search_aliases=["vram", "memory", "attention", "estimate"],
            is_output_node=True,
            inputs=[
                declare(
                    io.Combo.Input,
                    "preset",
                    options=list(PRESETS),
                    default="SD1.5",
                    tooltip="The network. Not looked at when a model is connected.",
                ),
                *size_inputs(),
                *batch_inputs(),
                declare(
                    io.Combo.Input,
                    "dtype",
                    options=["auto", *DTYPES],
                    default="auto",
                    tooltip="What the network computes in. auto: the connected model's own; bf16 for a preset.",
                ),
                *attention_inputs(),
                memory_input(),
                declare(
                    io.Model.Input,
                    "model",
                    optional=True,
                    tooltip="Its layers, dtype and weights are read instead of the preset.",
                ),
            ],
            outputs=[
                declare(io.Image.Output, "chart", display_name="chart", tooltip="All backends and all layers."),
                declare(io.String.Output, "report", display_name="report", tooltip="The verdict and the whole table."),
                declare(
                    io.Int.Output,
                    "attention_bytes",
                    display_name="attention_bytes",
                    tooltip="Peak of the largest attention layer on this backend.",
                ),
                declare(io.Int.Output, "latent_bytes", display_name="latent_bytes", tooltip="Size of the latent."),
                declare(io.Int.Output, "tokens", display_name="tokens", tooltip="Of the largest attention layer."),
                declare(
                    io.Int.Output,
                    "fitting_width",
                    display_name="fitting_width",
                    tooltip="The width asked for, or of the largest picture of this shape that fits. If none does, a "
                    "node behind it is not run.",
                ),
                declare(
                    io.Int.Output,
                    "fitting_height",
                    display_name="fitting_height",
                    tooltip="The height that belongs to fitting_width.",
                ),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, memory_gib: float | None = None, **constants: Any) -> str:
        from ..host.memory.estimate import memory_fingerprint

        return memory_fingerprint(memory_gib)

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        with loading(cls):
            from ..host.memory.estimate import attention_memory, chart_image
        estimate = attention_memory(**inputs)
        numbers = (estimate.attention.total, estimate.latent_bytes, estimate.tokens, *estimate.fitting)
        return shown(cls, estimate, *numbers, chart=chart_image(estimate))


NODES = [Ref2VEstimateAttentionMemory]
