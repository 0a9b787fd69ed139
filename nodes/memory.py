"""Know the memory before it is used."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..training.memory.attention import BACKENDS
from ..training.memory.estimate import DTYPES, SIZES
from ..training.memory.models import LARGEST_SIDE, PRESETS
from ..training.memory.optimizers import LAYOUTS, OPTIMIZERS
from ..training.memory.training_estimate import PRECISIONS
from ..training.memory.training_trace import ATTENTION, NETWORKS
from .host.memory_estimate import (
    CUSTOM,
    attention_memory,
    chart_image,
    columns_image,
    memory_fingerprint,
    training_memory,
)
from .host.model_memory import model_memory
from .host.schema import declare, node_schema

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
                declare(
                    io.Combo.Input,
                    "size",
                    options=[*SIZES, CUSTOM],
                    default="768x768",
                    tooltip="Width and height of the picture in pixels; custom takes the two numbers below.",
                ),
                declare(
                    io.Int.Input, "width", default=768, min=1, max=LARGEST_SIDE, tooltip="Pixels, with size on custom."
                ),
                declare(
                    io.Int.Input, "height", default=768, min=1, max=LARGEST_SIDE, tooltip="Pixels, with size on custom."
                ),
                declare(io.Int.Input, "batch_size", default=1, min=1, max=4096, tooltip="Pictures at once."),
                declare(
                    io.Int.Input,
                    "frames",
                    default=1,
                    min=1,
                    max=4096,
                    tooltip="Of a clip. Picture models take each frame as one more picture of the batch.",
                ),
                declare(
                    io.Combo.Input,
                    "dtype",
                    options=["auto", *DTYPES],
                    default="auto",
                    tooltip="What the network computes in. auto: the connected model's own; bf16 for a preset.",
                ),
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
                declare(
                    io.Float.Input,
                    "memory_gib",
                    default=0.0,
                    min=0.0,
                    max=65536.0,
                    step=0.5,
                    tooltip="Plan for an empty GPU of so many GiB; 0 asks this machine what is free now.",
                ),
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
                    tooltip="The width asked for, or of the largest picture of this shape that fits; 0: none does.",
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
        return memory_fingerprint(memory_gib)

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        estimate = attention_memory(**inputs)
        chart, report = chart_image(estimate), estimate.report()
        shown = {**ui.PreviewImage(chart, cls=cls).as_dict(), **ui.PreviewText(report).as_dict()}
        numbers = (estimate.attention.total, estimate.latent_bytes, estimate.tokens, *estimate.fitting)
        return io.NodeOutput(chart, report, *numbers, ui=shown)


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
                *_sizes(),
                declare(io.Int.Input, "batch_size", default=1, min=1, max=4096, tooltip="Pictures at once."),
                declare(
                    io.Int.Input,
                    "frames",
                    default=1,
                    min=1,
                    max=4096,
                    tooltip="Of a clip. Picture models take each frame as one more picture of the batch.",
                ),
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
                _memory(),
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
                    tooltip="Of the largest picture of this shape that fits; 0: none does.",
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
                    tooltip="How many of the asked size fit at once; 0: not one.",
                ),
                declare(
                    io.Int.Output,
                    "fitting_frames",
                    display_name="fitting_frames",
                    tooltip="Frames of a clip of the asked size that fit; 0 for picture models.",
                ),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, memory_gib: float | None = None, **constants: Any) -> str:
        return memory_fingerprint(memory_gib)

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        estimate = model_memory(**inputs)
        numbers = (estimate.total, estimate.weights, *estimate.largest_size)
        return _shown(cls, estimate, *numbers, estimate.largest_batch, estimate.largest_frames)


class Ref2VEstimateTrainingMemory(io.ComfyNode):
    """Says what training needs, before it starts: weights, gradients, optimizer, average and activations, on one GPU
    and on several, and what to change first where it does not fit.

    A step without data is traced: nothing is loaded or computed.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VEstimateTrainingMemory",
            display_name="Training Memory",
            category="Ref2V/Memory",
            search_aliases=["vram", "memory", "training", "optimizer", "fsdp", "estimate"],
            is_output_node=True,
            inputs=[
                declare(
                    io.Combo.Input,
                    "network",
                    options=list(NETWORKS),
                    default="sd15-half",
                    tooltip="A preset of Train Refiner, or a whole base model.",
                ),
                *_sizes(),
                declare(io.Int.Input, "batch", default=4, min=1, max=4096, tooltip="Pictures at once."),
                declare(
                    io.Int.Input, "accumulation", default=1, min=1, max=4096, tooltip="Batches that make one step."
                ),
                declare(
                    io.Combo.Input,
                    "precision",
                    options=list(PRECISIONS),
                    default="bf16",
                    tooltip="bf16 and fp16: autocast over FP32 weights. bf16 optimizers need bf16.",
                ),
                declare(
                    io.Combo.Input,
                    "optimizer",
                    options=list(OPTIMIZERS),
                    default="AdamW",
                    tooltip="AdamW is fused, as Train Refiner has it; the bf16 ones keep the weights in BF16.",
                ),
                declare(io.Boolean.Input, "ema", default=True, tooltip="A moving average of the weights in FP32."),
                declare(
                    io.Boolean.Input,
                    "checkpointing",
                    default=False,
                    tooltip="Gradient checkpointing: activations are computed again in the backward pass.",
                ),
                declare(
                    io.Combo.Input,
                    "attention",
                    options=list(ATTENTION),
                    default="pytorch",
                    tooltip="pytorch: fused, without scores. basic: the scores are held.",
                ),
                declare(
                    io.Combo.Input,
                    "layout",
                    options=list(LAYOUTS),
                    default="one GPU",
                    tooltip="How training is spread over GPUs. PP takes accumulation as its micro-batches.",
                ),
                declare(io.Int.Input, "gpus", default=8, min=1, max=4096, tooltip="For all layouts but one GPU."),
                _memory(),
            ],
            outputs=[
                declare(io.Image.Output, "chart", display_name="chart", tooltip="Every layout by what it consists of."),
                declare(io.String.Output, "report", display_name="report", tooltip="The verdict and the whole table."),
                declare(
                    io.Int.Output,
                    "peak_bytes",
                    display_name="peak_bytes",
                    tooltip="On each GPU, the assumed overhead included.",
                ),
                declare(
                    io.Int.Output,
                    "fitting_batch",
                    display_name="fitting_batch",
                    tooltip="Pictures at once that fit; 0: not one.",
                ),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, memory_gib: float | None = None, **constants: Any) -> str:
        return memory_fingerprint(memory_gib)

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        estimate = training_memory(**inputs)
        return _shown(cls, estimate, estimate.total, estimate.largest_batch)


def _sizes() -> list[Any]:
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


def _memory() -> Any:
    return declare(
        io.Float.Input,
        "memory_gib",
        default=0.0,
        min=0.0,
        max=65536.0,
        step=0.5,
        tooltip="Plan for an empty GPU of so many GiB; 0 asks this machine what is free now.",
    )


def _shown(node: type, estimate: Any, *numbers: int) -> io.NodeOutput:
    chart, report = columns_image(estimate), estimate.report()
    shown = {**ui.PreviewImage(chart, cls=node).as_dict(), **ui.PreviewText(report).as_dict()}
    return io.NodeOutput(chart, report, *numbers, ui=shown)


NODES = [Ref2VEstimateAttentionMemory, Ref2VEstimateModelMemory, Ref2VEstimateTrainingMemory]
