"""A whole graph's precision in one node: a preset, or what an audit found."""

from __future__ import annotations

from typing import Any

from ...training.errors import BadInput
from ...training.precision.presets import PRESETS, preset_plan
from ..host.absent import absent_where_none
from ..host.api import io, loading, ui
from ..host.schema import Node, declare, node_schema

__all__ = ["NODES", "PrecisionPlanType"]

PrecisionPlanType = io.Custom("REF2V_PRECISION_PLAN")  # what Precision Audit gives and Precision Plan takes


class Ref2VApplyPrecisionPlan(Node):
    """Gives MODEL, CLIP and VAE the dtypes of a plan, and says in a table what runs in what, how large it is, and why.

    recommended: half precision where it costs nothing to see, FP32 for the VAE decoder. article: all BF16 but the VAE
    decoder. quality: all FP32. fast: what this device computes fastest. low memory: weights in FP8. auto: what this
    device has in hardware. Link the plan of a Precision Audit, and that one counts.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VApplyPrecisionPlan",
            display_name="Precision Plan",
            category="Ref2V/Precision",
            is_output_node=True,
            search_aliases=["dtype preset", "bf16", "fp32 vae", "fp8", "mixed precision"],
            inputs=[
                declare(
                    io.Combo.Input,
                    "preset",
                    options=list(PRESETS),
                    default="recommended",
                    tooltip="Counts as long as no plan is linked.",
                ),
                declare(io.Model.Input, "model", optional=True, tooltip="Any MODEL, patched or not."),
                declare(io.Clip.Input, "clip", optional=True, tooltip="Any CLIP, of one text encoder or several."),
                declare(io.Vae.Input, "vae", optional=True, tooltip="Any VAE: of pictures, video or sound."),
                declare(
                    PrecisionPlanType.Input,
                    "plan",
                    optional=True,
                    tooltip="What a Precision Audit found; it counts instead of the preset.",
                ),
            ],
            outputs=[
                # not "model", "clip", "vae": older hosts refuse one id on both sides
                declare(io.Model.Output, "planned_model", display_name="model", tooltip="The MODEL as planned."),
                declare(io.Clip.Output, "planned_clip", display_name="clip", tooltip="The CLIP as planned."),
                declare(io.Vae.Output, "planned_vae", display_name="vae", tooltip="The VAE as planned."),
                declare(
                    io.String.Output,
                    "table",
                    display_name="table",
                    tooltip="What runs in what, the bytes before and after, and why.",
                ),
            ],
        )

    @classmethod
    def execute(cls, preset: str, model: Any = None, clip: Any = None, vae: Any = None, plan: Any = None):
        with loading(cls):
            from ..host.precision.plan import apply_plan, device_of
        given = {"model": model, "clip": clip, "vae": vae}
        if all(value is None for value in given.values()):
            raise BadInput("The Precision Plan has nothing to plan for: connect a model, a clip or a vae.")
        if plan is None:
            plan = preset_plan(preset, device_of(**given))
        planned = apply_plan(plan, **given)
        outputs = absent_where_none("Precision Plan", model=planned.model, clip=planned.clip, vae=planned.vae)
        return io.NodeOutput(*outputs, planned.table, ui=ui.PreviewText(planned.table).as_dict())


NODES = [Ref2VApplyPrecisionPlan]
