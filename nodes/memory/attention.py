"""What attention allocates at a size, per layer and backend."""

from __future__ import annotations

from typing import Any

from ...training.memory.estimate import DTYPES
from ...training.memory.models import PRESETS
from ..host.api import io, loading
from ..host.schema import declare, node_schema
from . import shared_inputs as shared

__all__ = ["NODES"]

_FITTING_WIDTH = (
    "The width asked for, or of the largest picture of this shape that fits. If none does, a node behind it is not run."
)


class Ref2VEstimateAttentionMemory(shared.MemoryNode):
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
                *shared.size_inputs(),
                *shared.batch_inputs(),
                declare(
                    io.Combo.Input,
                    "dtype",
                    options=["auto", *DTYPES],
                    default="auto",
                    tooltip="What the network computes in. auto: the connected model's own; bf16 for a preset.",
                ),
                *shared.attention_inputs(),
                shared.memory_input(),
                declare(
                    io.Model.Input,
                    "model",
                    optional=True,
                    tooltip="Its layers, dtype and weights are read instead of the preset.",
                ),
            ],
            outputs=[
                *shared.chart_and_report("All backends and all layers."),
                shared.number_output(
                    "attention_bytes",
                    "Peak of the largest attention layer on this backend.",
                ),
                shared.number_output("latent_bytes", "Size of the latent."),
                shared.number_output("tokens", "Of the largest attention layer."),
                *shared.fitting_size(_FITTING_WIDTH),
            ],
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        with loading(cls):
            from ..host.memory.estimate import attention_memory, chart_image
        estimate = attention_memory(**inputs)
        numbers = (estimate.attention.total, estimate.latent_bytes, estimate.tokens, *estimate.fitting)
        return shared.shown(cls, estimate, *numbers, chart=chart_image(estimate))


NODES = [Ref2VEstimateAttentionMemory]
