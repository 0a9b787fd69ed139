"""From pictures to a dataset on disk, from which a refiner is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..training.data.tensor_files import DTYPES
from ..training.errors import BadInput
from .base_source import BaseType, folder_fingerprint
from .host.api import io, loading, ui
from .host.paths import check_name, resolve_inside
from .host.schema import Node, declare, node_schema

if TYPE_CHECKING:
    import torch

    from .host.dataset.sources import BaseSource

__all__ = ["NODES"]

_CROPS = ["center", "random"]


class Ref2VBuildRefinerDataset(Node):
    """Turns pictures into pairs of target and base latents on disk, all that Train Refiner needs.

    Targets come from a folder (with captions in .txt or .caption files beside the pictures) or from images; the base
    comes from one of the Base nodes. A few pairs are made first and shown, with counts, disk space and time, before
    anything long begins. The folder is output/refiner_datasets/<name>-<recipe>: the same pictures and settings find it
    again, any change builds another.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VBuildRefinerDataset",
            display_name="Build Refiner Dataset",
            category="Ref2V/Dataset",
            search_aliases=["training data", "cache latents", "encode dataset"],
            is_output_node=True,
            is_input_list=True,  # a node before may give its pictures one by one: they are one dataset
            hidden=[io.Hidden.dynprompt, io.Hidden.unique_id],
            inputs=[
                declare(BaseType.Input, "base", tooltip="Where the base latents come from: one of the Base nodes."),
                declare(
                    io.Vae.Input,
                    "vae",
                    optional=True,
                    tooltip="Encodes target and base, in the precision it was loaded in. Not needed with latents.",
                ),
                declare(
                    io.Clip.Input,
                    "clip",
                    optional=True,
                    tooltip="Encodes the captions. Left open: the refiner has no text.",
                ),
                declare(
                    io.Image.Input,
                    "images",
                    optional=True,
                    tooltip="Target pictures, instead of a folder: one batch, or a list of pictures of any size.",
                ),
                declare(
                    io.String.Input,
                    "name",
                    default="refiner",
                    tooltip="The dataset's folder is output/refiner_datasets/<name>-<recipe>.",
                ),
                declare(
                    io.String.Input,
                    "folder",
                    default="",
                    optional=True,
                    tooltip="Folder of the target pictures, inside input, output, models or a root that you allowed.",
                ),
                declare(
                    io.String.Input,
                    "caption",
                    default="",
                    multiline=True,
                    optional=True,
                    tooltip="Text for pictures without a caption file (.txt or .caption) of the same name beside them.",
                ),
                declare(
                    io.Int.Input,
                    "width",
                    default=768,
                    min=64,
                    max=2048,
                    step=8,
                    optional=True,
                    tooltip="width x height is the area that larger pictures are scaled down to; each keeps its shape.",
                ),
                declare(
                    io.Int.Input,
                    "height",
                    default=768,
                    min=64,
                    max=2048,
                    step=8,
                    optional=True,
                    tooltip="With width, the area; 1024 x 1024 suits a refiner that works above its base.",
                ),
                declare(
                    io.Boolean.Input,
                    "mirror",
                    default=False,
                    optional=True,
                    tooltip="Adds a mirrored copy of each training picture. Not for text, faces or hands that matter.",
                ),
                declare(
                    io.Combo.Input,
                    "crop",
                    options=_CROPS,
                    default="center",
                    optional=True,
                    tooltip="Where the little is cut off that does not fit the size; random depends on seed and name.",
                ),
                declare(
                    io.Int.Input,
                    "held_out",
                    default=0,
                    min=0,
                    max=100000,
                    optional=True,
                    tooltip="Pictures kept out of training, to judge by. Pictures that look alike stay on one side.",
                ),
                declare(
                    io.Int.Input,
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFF,
                    optional=True,
                    # the front end would otherwise change it after each run, which makes another dataset of it
                    control_after_generate=False,
                    tooltip="Draws the held-out pictures and the random crops.",
                ),
                declare(
                    io.Boolean.Input,
                    "plan_only",
                    default=False,
                    optional=True,
                    tooltip="Only look: contact sheet, counts and estimate, nothing written.",
                ),
                declare(
                    io.Combo.Input,
                    "dtype",
                    options=list(DTYPES),
                    default="float32",
                    optional=True,
                    tooltip="Of latents and text on the disk. float16 and bfloat16: half the size, rounded.",
                ),
                declare(
                    io.Boolean.Input,
                    "masks",
                    default=False,
                    optional=True,
                    tooltip="What is transparent, or black in a file NAME_mask.png beside NAME.png, is not learnt.",
                ),
                declare(
                    io.Boolean.Input,
                    "subset_weights",
                    default=False,
                    optional=True,
                    tooltip="An epoch draws the pictures below a subfolder 10_name ten times, as kohya's scripts do.",
                ),
                declare(
                    io.String.Input,
                    "resolutions",
                    default="",
                    optional=True,
                    tooltip="Such as 512, 768: each picture at the area of each square, instead of width x height.",
                ),
            ],
            outputs=[
                declare(io.String.Output, "dataset", display_name="dataset", tooltip="Path of the dataset's folder."),
                declare(io.String.Output, "hash", display_name="hash", tooltip="Hash of its content."),
                declare(io.Image.Output, "contact_sheet", display_name="contact_sheet", tooltip="A few pairs."),
                declare(io.String.Output, "report", display_name="report", tooltip="Counts, sizes, what was skipped."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, name: list = ("",), folder: list = ("",), **_: object) -> object:
        """Runs again when pictures or captions changed, or when datasets of this name came or went."""
        from .host.dataset.recipe import built_datasets

        name, folder = name[0], folder[0]  # None where it comes over a link
        state = folder_fingerprint(folder, "folder")
        return state if state != state or name is None else [state, built_datasets(name)]

    @classmethod
    def execute(cls, images: list | None = None, caption: list = ("",), **inputs: list) -> io.NodeOutput:
        """Every input is a list, as long as what its link brings."""
        if images is not None and not images:
            raise BadInput("images brings no picture: the list is empty.")
        if images is not None and all(batch is None for batch in images):  # a link that brings nothing
            images = None
        for name, values in (("images", images or ()), ("caption", caption)):
            if any(value is None for value in values):
                raise BadInput(f"The input {name!r} is wired but nothing comes in, at least for a part of its list.")
        for name, values in inputs.items():
            if len(values) != 1:
                raise BadInput(f"{name} brings {len(values)} values at once, and one dataset has one.")
            if values[0] is None and name not in ("vae", "clip"):  # those have a sentence that names the checkpoint
                raise BadInput(f"The input {name!r} is wired but nothing comes in.")
        texts = [text.strip() for text in caption]
        several = {"captions": tuple(texts)} if len(texts) > 1 else {"caption": "".join(texts)}
        return cls._build(images=images, **several, **{name: values[0] for name, values in inputs.items()})

    @classmethod
    def _build(
        cls,
        base: BaseSource,
        name: str,
        vae: object = None,
        clip: object = None,
        images: list[torch.Tensor] | None = None,
        folder: str = "",
        caption: str = "",
        captions: tuple[str, ...] = (),
        width: int = 768,
        height: int = 768,
        mirror: bool = False,
        crop: str = "center",
        held_out: int = 0,
        seed: int = 0,
        plan_only: bool = False,
        dtype: str = "float32",
        masks: bool = False,
        subset_weights: bool = False,
        resolutions: str = "",
    ) -> io.NodeOutput:
        with loading(cls):
            from .host.dataset.build import build_dataset
            from .host.dataset.contact_sheet import as_image
            from .host.dataset.request import BuildRequest, parse_resolutions
            from .host.model.checkpoint_keys import check_checkpoint, loaded_from, refuse_empty_link
            from .host.progress import NodeProgress
        prompt, here = cls.hidden.dynprompt, cls.hidden.unique_id
        refuse_empty_link(prompt, here, "clip", clip)
        refuse_empty_link(prompt, here, "vae", vae)
        checkpoint = loaded_from(prompt, here, ["clip"])
        if checkpoint:
            check_checkpoint(checkpoint, clip=clip)
        request = BuildRequest(
            base=base,
            name=check_name(name, "name"),
            vae=vae,
            clip=clip,
            folder=Path(resolve_inside(folder, "folder")) if folder.strip() else None,
            images=images,
            caption=caption,
            captions=captions,
            max_pixels=width * height,
            mirror=mirror,
            crop=crop,
            held_out=held_out,
            seed=seed,
            plan_only=plan_only,
            dtype=dtype,
            masks=masks,
            subset_weights=subset_weights,
            resolutions=parse_resolutions(resolutions),
        )
        result = build_dataset(request, NodeProgress(here, 1))
        sheet = as_image(result.sheet)
        shown = {**ui.PreviewImage(sheet, cls=cls).as_dict(), **ui.PreviewText(result.report).as_dict()}
        return io.NodeOutput(result.folder, result.content_hash, sheet, result.report, ui=shown)


NODES = [Ref2VBuildRefinerDataset]
