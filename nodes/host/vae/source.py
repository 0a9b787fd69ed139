"""Which VAE came in: what it was made of, what its loader chose, and whether it has a dtype to select at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ....training.errors import BadInput
from ....training.precision.dtypes import dtype_of_most
from ..patching.private_copy import has_quantized_weights, is_dynamic
from ..patching.provenance import Provenance, guard_of, provenance_of

__all__ = [
    "RecognisedVAE",
    "VAEProvenance",
    "class_name",
    "recognise",
    "refuse_empty",
    "refuse_uncopyable",
    "refuse_without_dtype",
    "remember_loader",
]


@dataclass(frozen=True)
class VAEProvenance(Provenance):
    """What a VAE was made of. source: the VAE with the best weights at hand, None where it is the very one that carries
    this. encoder, decoder: the dtypes that the loader chose, to which "default" goes back. lacks: "encoder" or
    "decoder" where its file has no such half, else "".
    """

    encoder: torch.dtype
    decoder: torch.dtype
    lacks: str = ""


@dataclass(frozen=True)
class RecognisedVAE:
    """A VAE that came into a node. bare: without the NaN guard around it. guard: that, or None. provenance: with the
    VAE that has all the weights as its source, never None. dynamic: the source is under dynamic VRAM.
    """

    bare: Any
    guard: Any
    provenance: VAEProvenance
    dynamic: bool

    @property
    def source(self) -> Any:
        """The VAE with all the weights that it was made of; itself, where it is of none."""
        return self.provenance.source

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the weights in memory. Under dynamic VRAM it is the file's, whatever the loader chose."""
        return dtype_of_most(self.source.first_stage_model.parameters()) if self.dynamic else self.source.vae_dtype


def class_name(vae: Any) -> str:
    """The host's class of the VAE, such as "AutoencoderKL"."""
    return type(getattr(vae, "first_stage_model", None)).__name__


def refuse_empty(vae: Any) -> None:
    """BadInput for the VAE of a checkpoint that has none."""
    if getattr(vae, "first_stage_model", None) is None:
        raise BadInput("The vae holds no weights: the checkpoint that it comes from has no VAE.")


def recognise(vae: Any) -> RecognisedVAE:
    """Which VAE came in. BadInput for the VAE of a checkpoint that has none."""
    refuse_empty(vae)
    module = vae.first_stage_model
    guard, provenance = guard_of(module), provenance_of(module)
    bare = vae if guard is None else guard.unwrap(vae)
    if provenance is None:
        provenance = VAEProvenance(bare, bare.vae_dtype, bare.vae_dtype)
    elif provenance.source is None:
        provenance = replace(provenance, source=bare)
    return RecognisedVAE(bare, guard, provenance, is_dynamic(provenance.source.patcher))


def remember_loader(vae: Any, encoder: torch.dtype, decoder: torch.dtype, lacks: str = "") -> None:
    """Note on a VAE that our loader has just read, in FP32, what "default" means for it and for all made of it.

    `lacks`: "encoder" or "decoder" where the file has no such half, else "".
    """
    vae.first_stage_model.ref2v_provenance = VAEProvenance(None, encoder, decoder, lacks)


def refuse_without_dtype(source: Any) -> None:
    """BadInput for a VAE that another node has patched, and for one without weights."""
    what = class_name(source)
    if source.patcher.patches:
        raise BadInput(f"The VAE ({what}) is patched by another node; select its precision before that node.")
    if not any(True for _ in source.first_stage_model.children()):
        raise BadInput(f"The VAE ({what}) has no layers that compute, so it has no precision to select.")


def refuse_uncopyable(source: Any) -> None:
    """BadInput, with the reason, for a VAE that cannot be copied into another dtype."""
    refuse_without_dtype(source)
    if has_quantized_weights(source.first_stage_model):
        raise BadInput(f"The VAE ({class_name(source)}) has quantized weights, so there is no copy of it in FP32.")
