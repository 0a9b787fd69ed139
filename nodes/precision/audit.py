"""What each dtype costs a model that a person has, measured on it."""

from __future__ import annotations

from typing import Any

from ...training.precision.dtypes import AUDITED
from ..host.api import io, loading, ui
from ..host.schema import Node, declare, node_schema, seed_input
from .plan import PrecisionPlanType

__all__ = ["NODES"]

CATEGORY = "Ref2V/Precision"


class Ref2VAuditPrecision(Node):
    """Runs your own VAE, CLIP and MODEL in FP32 and in short dtypes, and says what that costs: whether an eye can see
    it, which layer it comes from, and which values FP16 cannot hold.

    Link what you want to know about; the rest may stay empty. None of the models is changed. The plan says which dtype
    is worth it for which part, with the reason.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VAuditPrecision",
            display_name="Precision Audit",
            category=CATEGORY,
            search_aliases=["dtype", "bf16 error", "fp16 overflow", "vae quality"],
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=[
                declare(
                    io.Model.Input, "model", optional=True, tooltip="Denoises once at each sigma. LoRA patches count."
                ),
                declare(io.Clip.Input, "clip", optional=True, tooltip="Each of its text encoders reads the prompt."),
                declare(
                    io.Vae.Input, "vae", optional=True, tooltip="Encodes and decodes the image: of pictures or video."
                ),
                declare(
                    io.Image.Input,
                    "image",
                    optional=True,
                    tooltip="Its first picture (9 frames for a video VAE) goes through the VAE. Empty: a built-in test "
                    "picture. Small ones are faster.",
                ),
                declare(
                    io.String.Input,
                    "prompt",
                    default="a red fox in the snow, morning light",
                    multiline=True,
                    tooltip="What the text encoders read, and what the model denoises towards.",
                ),
                declare(
                    io.Conditioning.Input,
                    "positive",
                    optional=True,
                    tooltip="What the model is conditioned on. Empty: the prompt by the clip, else zeros.",
                ),
                declare(
                    io.String.Input,
                    "sigmas",
                    default="early, middle, late",
                    tooltip="Where the model denoises once: early, middle, late (10, 50 and 90 % of the sampling), "
                    "other percentages such as 25%, or sigmas themselves.",
                ),
                declare(
                    io.Combo.Input,
                    "dtypes",
                    options=list(AUDITED),
                    default="bf16 and fp16",
                    tooltip="Compared with FP32. What FP16 cannot hold is counted in any case. On a CPU, FP16 is many "
                    "times slower.",
                ),
                seed_input("Of the noise, and of which values are compared between whole runs."),
            ],
            outputs=[
                declare(
                    io.String.Output, "report", display_name="report", tooltip="Verdicts, tables and the plan, as text."
                ),
                declare(
                    io.Image.Output,
                    "chart",
                    display_name="chart",
                    tooltip="Errors and ranges along the network, a row for each part.",
                ),
                declare(
                    io.Image.Output,
                    "differences",
                    display_name="differences",
                    tooltip="Difference pictures, amplified as written below each; grey where nothing differs.",
                ),
                declare(
                    PrecisionPlanType.Output,
                    "plan",
                    display_name="plan",
                    tooltip="What the audit would run in what, for Precision Plan.",
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, dtypes: str | None = None) -> bool:
        """Named here, the list is not checked by the host: a name that only a newer version has gets a sentence."""
        return True

    @classmethod
    def execute(
        cls,
        prompt: str,
        sigmas: str,
        dtypes: str,
        seed: int,
        model: Any = None,
        clip: Any = None,
        vae: Any = None,
        image: Any = None,
        positive: Any = None,
    ) -> io.NodeOutput:
        with loading(cls):
            from ..host.precision.audit import audit_precision
        audit = audit_precision(
            model,
            clip,
            vae,
            image,
            prompt=prompt,
            positive=positive,
            sigmas=sigmas,
            dtypes=dtypes,
            seed=seed,
            node_id=cls.hidden.unique_id,
        )
        shown = ui.PreviewText(audit.report).as_dict()
        return io.NodeOutput(audit.report, audit.chart, audit.differences, audit.plan, ui=shown)


NODES = [Ref2VAuditPrecision]
