"""The host's text encoder, as the dataset builder needs it: a caption becomes a context of a length all share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from ....training.errors import BadInput
from ..patching.fingerprint import hash_weights
from .select import compute_dtypes

__all__ = ["CaptionEncoder", "ContextShape", "check_conditioning", "clip_fingerprint"]

_CACHE_BYTES = 2 << 30
_MOST_CHUNKS = 2  # of a text encoder that works in padded chunks: CLIP's 77 tokens twice
_MOST_TOKENS = 512  # of one whose length follows the text
_POOLED_FOR_SURE = 1280  # CLIP-G, of SDXL and its refiner
_PADDED_FROM = 64  # an empty caption this long was padded: CLIP gives 77, T5 128 to 512


def clip_fingerprint(clip: Any) -> str:
    """Hex digest of the text encoder's class, weights (sampled, with what patches it), chosen layer and dtypes."""
    digest = hashlib.sha256(f"{type(clip.cond_stage_model).__name__} layer {clip.layer_idx}".encode())
    for name, dtype in compute_dtypes(clip).items():  # of those that were changed; weights tell their own
        digest.update(f"{name} computes in {dtype}".encode())
    hash_weights(digest, clip.patcher)
    return digest.hexdigest()


def check_conditioning(conditioning: list | None, what: str) -> None:
    """BadInput when a CONDITIONING holds NaN or infinity; `what` says of what it is."""
    for context, extra in conditioning or []:
        for tensor in (context, extra.get("pooled_output")):
            if tensor is not None and not torch.isfinite(tensor).all():
                raise BadInput(
                    f"The text encoder (CLIP) gives NaN or infinity for {what}: its weights are damaged or were not "
                    f"all in the checkpoint."
                )


@dataclass(frozen=True)
class ContextShape:
    """What one CLIP gives for every caption: `tokens` x `dim`, and `pooled` numbers (0 where there are none)."""

    tokens: int
    dim: int
    pooled: int


class CaptionEncoder:
    """Captions to (context [T,D], pooled [P] or None), all of one length T, encoded as the host's CLIPTextEncode does.

    T is chosen once, over all captions of a data set:

    - an encoder that pads (CLIP: chunks of 77 tokens; T5: 128 to 512) gives T = as many chunks as the longest caption
      needs, at most 2; what a caption holds beyond that is cut off;
    - an encoder whose length follows the text gives T = the longest caption, at most 512 tokens.

    A shorter context is repeated up to T. Attention over a context that is repeated a whole number of times gives
    exactly what it gives over the context once, so a caption of one chunk means the same in either length.

    Pooled output is kept only where a model may use it: SD1.x and SD2.x encoders give one as wide as the context, and
    no UNet of theirs takes it.
    """

    def __init__(self, clip: Any) -> None:
        self.clip = clip
        self.cut: list[str] = []  # captions that were longer than T
        self._cache: dict[str, list] = {}
        self._cached_bytes = 0
        self.shape: ContextShape | None = None

    def empty_shape(self) -> ContextShape:
        """What the empty caption gives: enough for an estimate, and it shows a broken encoder before any work."""
        context, pooled = self._encode_raw("")
        return ContextShape(context.shape[0], context.shape[1], 0 if pooled is None else pooled.shape[0])

    def measure(self, captions: list[str], each: Any = None) -> ContextShape:
        """Encode every distinct caption once (and the empty one) and settle the common length.

        `each()` is called before each caption, to stop or to show progress. Raises BadInput when one gives NaN.
        """
        empty = self.empty_shape()
        lengths = {"": empty.tokens}
        for caption in dict.fromkeys(captions):
            if each is not None:
                each()
            lengths[caption] = self._encode_raw(caption)[0].shape[0]
        unit = lengths[""]
        most = _MOST_CHUNKS * unit if unit >= _PADDED_FROM else max(_MOST_TOKENS, unit)
        tokens = min(max(lengths.values()), most)
        self.cut = [caption for caption, length in lengths.items() if length > tokens]
        self.shape = ContextShape(tokens, empty.dim, empty.pooled)
        return self.shape

    def encode(self, caption: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(context [T,D], pooled [P] or None) of one caption, float32 on the CPU. Call `measure` first."""
        context, pooled = self._encode_raw(caption)
        tokens = self.shape.tokens
        if context.shape[0] < tokens:
            context = context.repeat(-(-tokens // context.shape[0]), 1)
        return context[:tokens].clone(), pooled

    def conditioning(self, caption: str) -> list:
        """The caption as the host's CONDITIONING, for a sampler; unlike `encode`, of the caption's own length."""
        if caption in self._cache:
            return self._cache[caption]
        conditioning = self.clip.encode_from_tokens_scheduled(self.clip.tokenize(caption))
        check_conditioning(conditioning, f"the caption {caption[:60]!r}" if caption else "the empty caption")
        size = sum(4 * context.numel() for context, _ in conditioning)
        if self._cached_bytes + size <= _CACHE_BYTES:
            self._cache[caption] = conditioning
            self._cached_bytes += size
        return conditioning

    def _encode_raw(self, caption: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        context, extra = self.conditioning(caption)[0]
        pooled = extra.get("pooled_output")
        context = context[0].float().cpu().clone()
        pooled = None if pooled is None else pooled[0].float().cpu().clone()
        if pooled is not None and pooled.shape[0] == context.shape[1] and pooled.shape[0] != _POOLED_FOR_SURE:
            pooled = None
        return context, pooled
