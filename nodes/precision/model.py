"""The diffusion model: the dtype that it computes in, the one that it is kept in, and what stays in FP32."""

from __future__ import annotations

from typing import Any

from ..host.api import io, loading
from ..host.schema import Node, declare, node_schema
from .selectors import compute_input, report_output, selected_output, storage_input

__all__ = ["NODES"]


def _keep(name: str, what: str) -> Any:
    return declare(io.Boolean.Input, name, default=False, tooltip=f"Compute {what} in fp32.")


class Ref2VSelectModelPrecision(Node):
    """Gives a MODEL a dtype to compute in, which decides time and error, and one to be kept in, which decides the
    memory; parts of it can stay in FP32.

    The MODEL that comes in stays as it is. LoRA nodes and ControlNets work before and after. A second one of these
    nodes replaces what the first chose; with everything on default you get back what the loader chose. A dtype that
    this machine lacks is passed over, and the report says so.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VSelectModelPrecision",
            display_name="Select Model Precision",
            category="Ref2V/Precision",
            search_aliases=["unet dtype", "model dtype", "bf16 model", "fp8 model"],
            inputs=[
                declare(io.Model.Input, "model", tooltip="Any MODEL, patched or not."),
                compute_input(
                    "compute",
                    "Dtype in which the layers compute; it copies nothing. default: what the loader chose. "
                    "auto: bf16 where this machine has it in hardware, else fp16, else fp32.",
                ),
                storage_input(
                    "Dtype in which the weights are kept; another one than the loader chose needs a copy."
                ),
                _keep("keep_norms", "the normalisation layers"),
                _keep("keep_embeddings", "the embedding of time and, where there is one, of the label"),
                _keep("keep_in_out", "the first and the last layer"),
                _keep("keep_attention_softmax", "the softmax of attention"),
                declare(
                    io.String.Input,
                    "keep_layers",
                    default="",
                    multiline=True,
                    tooltip="Layers by name to compute in fp32, such as middle_block.* or *.attn2; commas or line "
                    "breaks stand between patterns, * for anything.",
                ),
            ],
            outputs=[
                # not "model": older hosts refuse one id on both sides
                declare(io.Model.Output, "selected", display_name="model", tooltip="The MODEL in the dtypes chosen."),
                report_output("What is kept and computes in what, and why; the memory that it takes."),
            ],
        )

    @classmethod
    def validate_inputs(cls, compute: str | None = None, storage: str | None = None) -> bool:
        """Named here, the lists are not checked by the host: a workflow from elsewhere may name a dtype that only a
        newer version has, and it shall run.
        """
        return True

    @classmethod
    def execute(
        cls,
        model: Any,
        compute: str,
        storage: str,
        keep_norms: bool,
        keep_embeddings: bool,
        keep_in_out: bool,
        keep_attention_softmax: bool,
        keep_layers: str,
    ) -> io.NodeOutput:
        with loading(cls):
            from ..host.model.select import Keep, select_model_precision
        keep = Keep(keep_norms, keep_embeddings, keep_in_out, keep_attention_softmax, keep_layers)
        selected = select_model_precision(model, compute, storage, keep)
        return selected_output(selected.model, selected.report)


NODES = [Ref2VSelectModelPrecision]
