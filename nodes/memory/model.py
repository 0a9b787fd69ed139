"""What a whole model allocates while it samples, encodes and decodes."""

from __future__ import annotations

from typing import Any

from ..host.api import io, loading
from ..host.schema import declare, node_schema
from .shared_inputs import attention_inputs, batch_inputs, memory_input, shown, size_inputs

__all__ = ["NODES"]


class Ref2VEstimateModelMemory(io.ComfyNode):
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
                *size_inputs(),
                *batch_inputs(),
                *attention_inputs(),
                memory_input(),
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
                declare(io.Image.Output, "chart", display_name="chart", tooltip="Every phase by what it consists of."),
                declare(io.String.Output, "report", display_name="report", tooltip="The verdict and the whole table."),
                declare(
                    io.Int.Output,
                    "peak_bytes",
                    display_name="peak_bytes",
                    tooltip="Weights, the largest phase and the assumed overhead.",
                ),
                declare(
                    io.Int.Output,
                    "weight_bytes",
                    display_name="weight_bytes",
                    tooltip="All connected weights.",
                ),
                declare(
                    io.Int.Output,
                    "fitting_width",
                    display_name="fitting_width",
                    tooltip="Of the largest picture of this shape that fits. If none does, a node behind it is not "
                    "run.",
                ),
                declare(
                    io.Int.Output,
                    "fitting_height",
                    display_name="fitting_height",
                    tooltip="The height that belongs to fitting_width.",
                ),
                declare(
                    io.Int.Output,
                    "fitting_batch",
                    display_name="fitting_batch",
                    tooltip="How many of the asked size fit at once. If not one does, a node behind it is not run.",
                ),
                declare(
                    io.Int.Output,
                    "fitting_frames",
                    display_name="fitting_frames",
                    tooltip="Frames of a clip of the asked size that fit. For picture models a node behind it is not "
                    "run.",
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
            from ..host.memory.model_memory import model_memory
        estimate = model_memory(**inputs)
        numbers = (estimate.total, estimate.weights, *estimate.largest_size)
        return shown(cls, estimate, *numbers, estimate.largest_batch, estimate.largest_frames)


NODES = [Ref2VEstimateModelMemory]
