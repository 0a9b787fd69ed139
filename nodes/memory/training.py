"""What a training step allocates, on one device and on several."""

from __future__ import annotations

from typing import Any

from ...training.config.sections import MOST_RANK
from ...training.memory.optimizers import LAYOUTS, OPTIMIZERS
from ...training.memory.training_estimate import PRECISIONS
from ...training.memory.training_trace import ATTENTION, NETWORKS
from ..host.api import io, loading
from ..host.schema import declare, node_schema
from .shared_inputs import MemoryNode, chart_and_report, memory_input, number_output, shown, size_inputs

__all__ = ["NODES"]

_FITTING_BATCH = "Pictures at once that fit. If not one does, a node behind it is not run."


class Ref2VEstimateTrainingMemory(MemoryNode):
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
                *size_inputs(),
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
                memory_input(),
                declare(
                    io.Int.Input,
                    "lora_rank",
                    default=0,
                    min=0,
                    max=MOST_RANK,
                    optional=True,  # graphs of before it run on
                    tooltip="Of adapters (LoRA) on all convolutions and linear layers; 0 trains the whole network.",
                ),
            ],
            outputs=[
                *chart_and_report("Every layout by what it consists of."),
                number_output("peak_bytes", "On each GPU, the assumed overhead included."),
                number_output("fitting_batch", _FITTING_BATCH),
            ],
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        with loading(cls):
            from ..host.memory.estimate import training_memory
        estimate = training_memory(**inputs)
        return shown(cls, estimate, estimate.total, estimate.largest_batch)


NODES = [Ref2VEstimateTrainingMemory]
