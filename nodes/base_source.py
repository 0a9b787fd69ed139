"""Where the base latents of a dataset come from: four nodes that give a REF2V_BASE to Build Refiner Dataset."""

from __future__ import annotations

from ..training.data.degrade import AMOUNTS, check_degradation
from .host.api import io, loading
from .host.model.base_model import sampler_names, scheduler_names
from .host.paths import resolve_inside
from .host.schema import Node, declare, node_schema, seed_input

__all__ = ["NODES", "BaseType"]

BaseType = io.Custom("REF2V_BASE")
_CATEGORY = "Ref2V/Dataset"


def _base_output() -> io.Output:
    return declare(
        BaseType.Output, display_name="base", tooltip="Where base latents come from, for Build Refiner Dataset."
    )


class Ref2VDegradeBase(Node):
    """The base latent is the target picture made worse and encoded again: no base model is needed.

    resize is the usual choice: the picture is shrunk by a factor and enlarged again, so the refiner learns to bring
    a low-resolution base up to full detail. blur and jpeg teach it to undo those.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VDegradeBase",
            display_name="Base from Degradation",
            category=_CATEGORY,
            search_aliases=["upscale", "sharpen", "low resolution"],
            inputs=[
                declare(
                    io.Combo.Input,
                    "kind",
                    options=list(AMOUNTS),
                    default="resize",
                    tooltip="resize: smaller and back, bicubic. blur: Gaussian. jpeg: compression.",
                ),
                declare(
                    io.Float.Input,
                    "amount",
                    default=3.0,
                    min=0.1,
                    max=100.0,
                    step=0.5,
                    tooltip="resize: the factor (3 = to a third and back). blur: sigma in pixels. jpeg: quality 1-100.",
                ),
            ],
            outputs=[_base_output()],
        )

    @classmethod
    def execute(cls, kind: str, amount: float) -> io.NodeOutput:
        with loading(cls):
            from .host.dataset.sources import DegradeBase
        check_degradation(kind, amount)
        return io.NodeOutput(DegradeBase(kind, float(amount)))


class Ref2VSampleBase(Node):
    """The base latent is what the base model makes of the target: noised a little, then denoised by its own sampler.

    This is what the refiner will meet when it works behind that model. Set steps, cfg, sampler and scheduler as you
    use them. Without conditioning, the pictures' own captions are used, through the clip of Build Refiner Dataset.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VSampleBase",
            display_name="Base from Model",
            category=_CATEGORY,
            inputs=[
                declare(io.Model.Input, "model", tooltip="The base model that the refiner will stand behind."),
                declare(
                    io.Conditioning.Input,
                    "positive",
                    optional=True,
                    tooltip="For all pictures. Left open: each picture's own caption.",
                ),
                declare(
                    io.Conditioning.Input,
                    "negative",
                    optional=True,
                    tooltip="Left open: the empty caption. Not looked at when cfg is 1.",
                ),
                declare(io.Int.Input, "steps", default=20, min=1, max=1000, tooltip="As in KSampler."),
                declare(io.Float.Input, "cfg", default=7.0, min=0.0, max=100.0, step=0.1, tooltip="As in KSampler."),
                declare(
                    io.Combo.Input,
                    "sampler_name",
                    options=sampler_names(),
                    default="euler",
                    tooltip="As in KSampler.",
                ),
                declare(
                    io.Combo.Input, "scheduler", options=scheduler_names(), default="normal", tooltip="As in KSampler."
                ),
                declare(
                    io.Float.Input,
                    "denoise",
                    default=0.3,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    tooltip="How much noise the target gets: low, so that the base still shows the same picture.",
                ),
                seed_input("Picture number n is noised with seed + n.", 0xFFFFFFFFFFFFFFFF),
                declare(
                    io.Int.Input,
                    "width",
                    default=0,
                    min=0,
                    max=2048,
                    step=8,
                    optional=True,
                    tooltip="width x height is the area at which the base is made, then enlarged. 0: as the target.",
                ),
                declare(
                    io.Int.Input,
                    "height",
                    default=0,
                    min=0,
                    max=2048,
                    step=8,
                    optional=True,
                    tooltip="With width, the area: 768 x 768 for a base whose pictures are refined at 1024 x 1024.",
                ),
            ],
            outputs=[_base_output()],
            hidden=[io.Hidden.dynprompt, io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model: object,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        denoise: float,
        seed: int,
        positive: list | None = None,
        negative: list | None = None,
        width: int = 0,
        height: int = 0,
    ) -> io.NodeOutput:
        with loading(cls):
            from .host.clip.host_clip import check_conditioning
            from .host.dataset.sources import SampleBase
            from .host.model.base_model import latent_scaling
            from .host.model.checkpoint_keys import check_checkpoint, loaded_from
        prompt, here = cls.hidden.dynprompt, cls.hidden.unique_id
        checkpoint = loaded_from(prompt, here, ["model"])
        if checkpoint:
            check_checkpoint(checkpoint, model=model)
        for name, conditioning in (("positive", positive), ("negative", negative)):
            checkpoint = loaded_from(prompt, here, [name, "clip"])
            if checkpoint:
                check_checkpoint(checkpoint, text_encoder=True)
            check_conditioning(conditioning, f"the {name} conditioning")
        latent_scaling(model)  # says so here if this model's latents cannot be carried by a refiner file
        sampling = steps, cfg, sampler_name, scheduler, denoise, seed
        return io.NodeOutput(SampleBase(model, positive, negative, *sampling, width, height))


class Ref2VPairBase(Node):
    """The base latent is a second picture of the same name in another folder: "before" to the target's "after".

    The names must match but for the ending (fox.png and fox.jpg do), and both must show the same frame; the sizes
    may differ. Pictures without a partner are left out and listed in the report.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VPairBase",
            display_name="Base from Paired Folder",
            category=_CATEGORY,
            search_aliases=["before after"],
            inputs=[
                declare(
                    io.String.Input,
                    "before_folder",
                    default="",
                    tooltip="Folder of the 'before' pictures, inside input, output, models or a root that you allowed.",
                )
            ],
            outputs=[_base_output()],
        )

    @classmethod
    def fingerprint_inputs(cls, before_folder: str | None = None) -> object:
        return folder_fingerprint(before_folder, "before_folder")

    @classmethod
    def execute(cls, before_folder: str) -> io.NodeOutput:
        with loading(cls):
            from .host.dataset.sources import PairBase
        return io.NodeOutput(PairBase(resolve_inside(before_folder, "before_folder")))


class Ref2VLatentBase(Node):
    """Target and base are both latents that you have: two LATENT batches of one shape, of any channel count.

    Leave folder and images of Build Refiner Dataset empty then. Its vae may stay empty too, and serves only to show
    the pairs; the scale of the latents is measured from them.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VLatentBase",
            display_name="Base from Latents",
            category=_CATEGORY,
            inputs=[
                declare(io.Latent.Input, "target", tooltip="What the refiner should give."),
                declare(io.Latent.Input, "base_latent", tooltip="What it is given, in the same order."),
            ],
            outputs=[_base_output()],
        )

    @classmethod
    def execute(cls, target: dict, base_latent: dict) -> io.NodeOutput:
        with loading(cls):
            from .host.dataset.sources import LatentBase
        return io.NodeOutput(LatentBase(target, base_latent))


def folder_fingerprint(folder: str | None, kind: str) -> object:
    """What the host compares to know whether a folder changed. A path that comes over a link (None) is not known yet,
    so the node always runs then; it finds a finished dataset again by its contents."""
    if folder is None:
        return float("nan")
    if not folder.strip():
        return ""
    from .host.dataset.recipe import folder_state

    return folder_state(resolve_inside(folder, kind))


NODES = [Ref2VDegradeBase, Ref2VSampleBase, Ref2VPairBase, Ref2VLatentBase]
