"""The text encoders of a CLIP, each kept and computing in a dtype of its own."""

from __future__ import annotations

from typing import Any

from ..host.api import io, loading
from ..host.clip.select import ALL, ENCODERS
from ..host.schema import Node, declare, node_schema
from .selectors import compute_input, report_output, selected_output, storage_input

__all__ = ["NODES"]


class Ref2VSelectCLIPPrecision(Node):
    """Gives the text encoders of a CLIP a dtype to be kept in, which decides the memory, and one to compute in, which
    decides time and error. What comes out stays FP32.

    The CLIP that comes in stays as it is. Chain these nodes to choose for one encoder after the other; default gives an
    encoder back as it was loaded, after any chain of these nodes. LoRA nodes may stand before and after. An encoder
    that the CLIP does not have, or a dtype that this machine lacks, is passed over, and the report says so.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VSelectCLIPPrecision",
            display_name="Select CLIP Precision",
            category="Ref2V/Precision",
            search_aliases=["clip dtype", "text encoder dtype", "t5 fp8", "fp32 text encoder"],
            inputs=[
                declare(io.Clip.Input, "clip", tooltip="Any CLIP: one text encoder, or several."),
                declare(
                    io.Combo.Input,
                    "encoder",
                    options=[ALL, *ENCODERS],
                    default=ALL,
                    tooltip="Which text encoder to choose for. The report says which ones this CLIP has.",
                ),
                storage_input(
                    "Dtype in which the weights are kept. default: what the loader chose, mostly fp16. fp8: "
                    "half the memory of fp16, and an error to look at."
                ),
                compute_input(
                    "compute",
                    "Dtype in which the layers compute. default and auto: fp32, as ComfyUI does.",
                ),
            ],
            outputs=[
                # not "clip": older hosts refuse one id on both sides
                declare(io.Clip.Output, "selected", display_name="clip", tooltip="The CLIP in the dtypes chosen."),
                report_output("Which encoder is kept and computes in what, and why; the memory that it takes."),
            ],
        )

    @classmethod
    def validate_inputs(
        cls, encoder: str | None = None, storage: str | None = None, compute: str | None = None
    ) -> bool:
        """Named here, the lists are not checked by the host: a workflow from elsewhere may name an encoder or a dtype
        that only a newer version has, and it shall run.
        """
        return True

    @classmethod
    def execute(cls, clip: Any, encoder: str, storage: str, compute: str) -> io.NodeOutput:
        with loading(cls):
            from ..host.clip.select import select_clip_precision
        selected = select_clip_precision(clip, encoder, storage, compute)
        return selected_output(selected.clip, selected.report)


NODES = [Ref2VSelectCLIPPrecision]
