"""A NaN is named where it comes from, instead of becoming a black picture."""

from __future__ import annotations

from typing import Any

from ...training.errors import BadInput
from ..host.absent import absent_where_none
from ..host.api import io, loading, ui
from ..host.patching.guard import ON_NAN, STOP, Guard
from ..host.schema import Node, declare, node_schema

__all__ = ["NODES"]


class Ref2VGuardNaN(Node):
    """Says which module and which layer gave NaN or infinity, and why, instead of letting it become a black picture.

    Only the output of each module is looked at, which costs next to nothing. When it is not finite, the same call runs
    once more to find the layer; then the guard stops with one sentence, runs that module again in FP32, or goes on.
    Connect any of model, clip and vae; what comes in stays as it is.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VGuardNaN",
            display_name="NaN Guard",
            category="Ref2V/Precision",
            search_aliases=["black image", "nan", "black picture", "no-half-vae"],
            inputs=[
                declare(io.Model.Input, "model", optional=True, tooltip="Its UNet, or other network, is guarded."),
                declare(io.Clip.Input, "clip", optional=True, tooltip="Its text encoders are guarded."),
                declare(io.Vae.Input, "vae", optional=True, tooltip="Its encoder and its decoder are guarded."),
                declare(
                    io.Combo.Input,
                    "on_nan",
                    options=list(ON_NAN),
                    default=STOP,
                    tooltip="stop: end with a sentence that names the layer. re-run in FP32: run that module once more "
                    "in FP32 and go on with what it gives; it stops if that is no better. report only: say it and go "
                    "on.",
                ),
            ],
            outputs=[
                # not "model", "clip", "vae": older hosts refuse one id on both sides
                declare(io.Model.Output, "guarded_model", display_name="model", tooltip="The MODEL, guarded."),
                declare(io.Clip.Output, "guarded_clip", display_name="clip", tooltip="The CLIP, guarded."),
                declare(io.Vae.Output, "guarded_vae", display_name="vae", tooltip="The VAE, guarded."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, on_nan: str, model: Any = None, clip: Any = None, vae: Any = None) -> io.NodeOutput:
        with loading(cls):
            from ..host.clip.guard import guard_clip
            from ..host.model.guard import guard_model
            from ..host.vae.guard import guard_vae
        given = {"model": model, "clip": clip, "vae": vae}
        if all(value is None for value in given.values()):
            raise BadInput("The NaN Guard has nothing to guard: connect a model, a clip or a vae.")
        guards = {"model": guard_model, "clip": guard_clip, "vae": guard_vae}
        guard = Guard(on_nan, cls.hidden.unique_id)
        guarded = {name: guards[name](value, guard) for name, value in given.items() if value is not None}
        outputs = absent_where_none("NaN Guard", **{**dict.fromkeys(given), **guarded})
        names = ", ".join(guarded)
        return io.NodeOutput(*outputs, ui=ui.PreviewText(f"Guarded: {names}. On NaN: {on_nan}.").as_dict())


NODES = [Ref2VGuardNaN]
