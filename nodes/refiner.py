"""Train a refiner, load it, and give it to the ordinary samplers."""

from __future__ import annotations

from typing import Any, get_args

import torch

from ..training.config.choices import PrecisionChoice
from ..training.config.network import PRESETS
from .host.api import io, loading, ui
from .host.paths import list_refiners
from .host.refiner.choice import GO_ON, NO_FILES, START_OVER, choose_refiner, fingerprint_refiner, note_loaded
from .host.schema import Node, declare, node_schema, seed_input

__all__ = ["NODES"]

CATEGORY = "Ref2V/Refiner"


class Ref2VTrainRefiner(Node):
    """Trains an 8-step refiner on a dataset from Build Refiner Dataset: it learns what separates the base's output
    from the target, and nothing else.

    The run is kept in output/refiners/<run_name>. Queue it again after a stop and it goes on; a finished run of the
    same settings is reused. While it trains, the node shows the loss curve and held-out pictures in turn.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VTrainRefiner",
            display_name="Train Refiner",
            category=CATEGORY,
            search_aliases=["train", "fine-tune", "refiner training"],
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=[
                declare(io.String.Input, "dataset", default="", tooltip="The dataset's folder: link it, or type it."),
                declare(
                    io.String.Input,
                    "run_name",
                    default="my refiner",
                    tooltip="Name of the run; its folder is output/refiners/<run_name>.",
                ),
                declare(
                    io.Combo.Input,
                    "preset",
                    options=["auto", *PRESETS],
                    default="auto",
                    tooltip="The network. auto looks at the dataset; sd15-half and sdxl-half are half as wide as "
                    "their base, about a quarter of its parameters.",
                ),
                declare(
                    io.Int.Input,
                    "epochs",
                    default=8,
                    min=1,
                    max=100000,
                    tooltip="How often each pair is seen. 8 suits a refiner; a small dataset needs more.",
                ),
                declare(
                    io.Int.Input, "batch_size", default=4, min=1, max=4096, tooltip="Pairs per step; more needs memory."
                ),
                declare(
                    io.Float.Input,
                    "learning_rate",
                    default=1e-4,
                    min=1e-7,
                    max=1.0,
                    step=1e-6,
                    tooltip="Peak of the learning rate, after a short warm-up; it falls to zero by the end, unless "
                    "Training Options has another schedule.",
                ),
                declare(
                    io.Int.Input,
                    "crop",
                    default=0,
                    min=0,
                    max=4096,
                    tooltip="Side of the square training crops in latent cells (1 cell = 8 pixels for most VAEs); "
                    "0 = whole pictures.",
                ),
                declare(
                    io.Combo.Input,
                    "precision",
                    options=list(get_args(PrecisionChoice)),
                    default="fp32",
                    tooltip="Of the computation; weights stay in float32. bf16 is faster on recent GPUs. pure_bf16 "
                    "keeps the weights in bfloat16 too and needs less memory. auto: bf16 where the device has it in "
                    "hardware, else fp32.",
                ),
                seed_input("The same seed, settings and dataset give the same refiner."),
                declare(
                    io.Combo.Input,
                    "if_run_exists",
                    options=[GO_ON, START_OVER],
                    default=GO_ON,
                    tooltip="start over keeps the earlier run beside it as <run_name>.previous-N.",
                ),
                declare(
                    io.String.Input,
                    "options",
                    default="{}",
                    multiline=True,
                    dynamic_prompts=False,
                    tooltip="Everything else: link Training Options, or type JSON: "
                    '{"flow": {"on_grid": 1}, "data": {"mirror": true}}.',
                    advanced=True,
                ),
            ],
            outputs=[
                declare(io.String.Output, "refiner", display_name="refiner", tooltip="Path of refiner.safetensors."),
                declare(io.String.Output, "report", display_name="report", tooltip="What was done and measured."),
                declare(io.Image.Output, "loss", display_name="loss", tooltip="The loss curve."),
            ],
        )

    @classmethod
    def fingerprint_inputs(
        cls, run_name: str | None = None, dataset: str | None = None, options: str | None = None, **constants: Any
    ) -> str:
        from .host.refiner.training import fingerprint

        return fingerprint(run_name, dataset, options, **constants)

    @classmethod
    def execute(cls, if_run_exists: str, **inputs: Any) -> io.NodeOutput:
        with loading(cls):
            from .host.refiner.training import train_refiner
        trained = train_refiner(cls.hidden.unique_id, if_run_exists, **inputs)
        shown = {**ui.PreviewImage(trained.loss, cls=cls).as_dict(), **ui.PreviewText(trained.report).as_dict()}
        return io.NodeOutput(trained.path, trained.report, trained.loss, ui=shown)


class Ref2VLoadRefiner(Node):
    """Loads a refiner for the ordinary KSampler: 8 steps, euler, simple, cfg 1, denoise 1, with the base's LATENT as
    latent_image.

    The CONDITIONING is the run's own empty one; use it as negative, and as positive too where there is no text.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VLoadRefiner",
            display_name="Load Refiner",
            category=CATEGORY,
            search_aliases=["refiner", "load model"],
            inputs=[
                declare(
                    io.Combo.Input,
                    "refiner",
                    options=list_refiners() or [NO_FILES],
                    tooltip="A file in models/refiners or output/refiners. Not looked at when a path is linked.",
                ),
                declare(
                    io.Float.Input,
                    "strength",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    tooltip="0 = the base's picture, 1 = the refined one, between them a blend of the two latents.",
                ),
                declare(
                    io.String.Input,
                    "path",
                    optional=True,
                    force_input=True,
                    tooltip="Path of a refiner, from Train Refiner; wins over the list.",
                ),
            ],
            outputs=[
                declare(
                    io.Model.Output, "model", display_name="model", tooltip="For KSampler, SamplerCustom and others."
                ),
                declare(
                    io.Conditioning.Output,
                    "conditioning",
                    display_name="conditioning",
                    tooltip="The refiner's own empty conditioning.",
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, refiner: str | None = None) -> bool:
        """Named here, the list is not checked by the host: a file that is gone gets its own sentence in `execute`."""
        return True

    @classmethod
    def fingerprint_inputs(
        cls, refiner: str | None = None, strength: float | None = None, path: str | None = None
    ) -> str:
        return fingerprint_refiner(refiner, strength, path)

    @classmethod
    def execute(cls, refiner: str, strength: float, path: str | None = None) -> io.NodeOutput:
        with loading(cls):
            from .host.refiner.model import load_refiner_model
        file = choose_refiner(refiner, path)
        loaded = load_refiner_model(file, strength)
        note_loaded(file, strength, loaded[0], linked=path is not None)
        return io.NodeOutput(*loaded)


class Ref2VConditionRefiner(Node):
    """Gives a refiner its base through the conditioning, for runs whose latent_image is not the base: the second half
    of a split run, or an Empty Latent Image as the start.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VConditionRefiner",
            display_name="Refiner Conditioning",
            category=CATEGORY,
            inputs=[
                declare(io.Conditioning.Input, "conditioning", tooltip="Text, or the CONDITIONING of Load Refiner."),
                declare(io.Latent.Input, "base", tooltip="The base's LATENT, of the size that is sampled."),
            ],
            outputs=[
                # not "conditioning": older hosts refuse one id on both sides
                declare(
                    io.Conditioning.Output, "with_base", display_name="conditioning", tooltip="With the base in it."
                )
            ],
        )

    @classmethod
    def execute(cls, conditioning: list[Any], base: dict[str, torch.Tensor]) -> io.NodeOutput:
        with loading(cls):
            from .host.refiner.model import add_base
        return io.NodeOutput(add_base(conditioning, base))


class Ref2VGetRefinerSigmas(Node):
    """The sigmas that a refiner was trained for (8 steps and the final 0), for SamplerCustom and split runs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VGetRefinerSigmas",
            display_name="Refiner Sigmas",
            category=CATEGORY,
            inputs=[declare(io.Model.Input, "model", tooltip="The MODEL of Load Refiner.")],
            outputs=[declare(io.Sigmas.Output, "sigmas", display_name="sigmas", tooltip="From 1 down to 0.")],
        )

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        with loading(cls):
            from .host.refiner.model import own_sigmas
        return io.NodeOutput(own_sigmas(model))


NODES = [Ref2VTrainRefiner, Ref2VLoadRefiner, Ref2VConditionRefiner, Ref2VGetRefinerSigmas]
