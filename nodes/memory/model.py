"""What a whole model allocates while it samples, encodes and decodes."""

from __future__ import annotations

from typing import Any

from ..host.api import io, loading
from ..host.schema import declare, node_schema
from . import shared_inputs as shared

__all__ = ["NODES"]


class Ref2VEstimateModelMemory(shared.MemoryNode):
    """Says what a whole model will need at a size, before it runs: weights by module, sampling, and the VAE's work,
    whole and in tiles; and the largest picture, batch or clip that fits.

    A pass without data is traced: nothing is loaded or computed.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VEstimateModelMemory",
            display_name="Model Memory",
            category="Ref2V/Memory",
            search_aliases=["vram", "memory", "model", "estimate", "offload"],
            is_output_node=True,
            inputs=[
                declare(
                    io.Model.Input,
                    "model",
                    tooltip="A UNet (SD1.x, SD2.x, SDXL, our refiners), SD3, Flux or Wan, with its LoRAs.",
                ),
                *shared.size_inputs(),
                *shared.batch_inputs(),
                *shared.attention_inputs(),
                shared.memory_input(),
                declare(io.Clip.Input, "clip", optional=True, tooltip="Its weights are counted."),
                declare(io.Vae.Input, "vae", optional=True, tooltip="Its weights, encoding and decoding are counted."),
                declare(
                    io.ControlNet.Input,
                    "control_net",
                    optional=True,
                    tooltip="A ControlNet for UNets: its weights, and its pass before the network's.",
                ),
            ],
            outputs=[
                *shared.chart_and_report("Every phase by what it consists of."),
                shared.number_output("peak_bytes", "Weights, the largest phase and the assumed overhead."),
                shared.number_output("weight_bytes", "All connected weights."),
                *shared.fitting_size(
                    "Of the largest picture of this shape that fits. If none does, a node behind it is not "
                    "run."
                ),
                shared.number_output(
                    "fitting_batch",
                    "How many of the asked size fit at once. If not one does, a node behind it is not run.",
                ),
                shared.number_output(
                    "fitting_frames",
                    "Frames of a clip of the asked size that fit. For picture models a node behind it is not "
                    "run.",
                ),
            ],
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        with loading(cls):
            from ..host.memory.model_memory import model_memory
        estimate = model_memory(**inputs)
        numbers = (estimate.total, estimate.weights, *estimate.largest_size)
        return shared.shown(cls, estimate, *numbers, estimate.largest_batch, estimate.largest_frames)


NODES = [Ref2VEstimateModelMemory]
