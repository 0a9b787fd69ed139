"""The text encoders of a CLIP in short dtypes, stored and computed, on one prompt.

The host stores text encoders in FP16 on most GPUs and computes them in FP32 always. So there are two questions: what a
shorter storage costs, with the host's FP32 compute over it, and what a shorter compute costs, over the weights as they
were loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import repeat
from torch import Tensor

from ....training.errors import BadInput
from ....training.precision.assessment import TEXT_LIMIT, Choice, choose, describe_tensor_error
from ....training.precision.audit import Audit
from ....training.precision.audit_report import AuditPart
from ....training.precision.dtypes import DTYPES
from ..patching.audited import Audited, error_of, native_support
from ..patching.exact_float32 import exact_float32
from ..patching.patcher import patcher_of_copy
from ..patching.private_copy import copy_module
from ..patching.storage import storage_name
from .select import storage_dtype_of, text_encoders

__all__ = ["AuditedCLIP", "audit_clip", "runs_of_clip"]


@dataclass
class AuditedCLIP(Audited):
    """compute: encoder -> the dtype to compute in; differences: (what, [tokens, dim])."""

    compute: dict[str, Choice] = field(default_factory=dict)
    storage: dict[str, str] = field(default_factory=dict)  # encoder -> why its storage stays
    differences: list[tuple[str, Tensor]] = field(default_factory=list)


def runs_of_clip(names: tuple[str, ...]) -> int:
    """Steps of a progress bar."""
    return 1 + 2 * len(names)


def audit_clip(clip: Any, prompt: str, names: tuple[str, ...], seed: int, step: Callable[[str], None]) -> AuditedCLIP:
    """`step(line)` is called before each run. All runs go through the host's `encode_from_tokens`; the hooks that watch
    are gone afterwards. Raises BadInput for a CLIP without text encoders that are known, or whose weights are damaged.
    """
    encoders = text_encoders(clip.cond_stage_model)
    if not encoders:
        raise BadInput(f"The clip ({type(clip.cond_stage_model).__name__}) has no text encoder that is known here.")
    # an operation of the host casts its weights to its input's dtype, so a layer runs alone as it is
    audits = {name: Audit(names, in_dtype=lambda layer, _dtype: layer, seed=seed) for name in encoders}
    audited = AuditedCLIP()

    step("CLIP as loaded")
    with ExitStack() as stack:
        stack.enter_context(exact_float32())
        for name, encoder in encoders.items():
            stack.enter_context(audits[name].reference(_watched(encoder)))
        reference = _encode(clip, prompt)
    for name, tensors in reference.items():
        if not all(torch.isfinite(x).all() for x in tensors):
            raise BadInput(f"The text encoder {name} gives NaN or infinity as loaded already: its weights are damaged.")
    parts = {name: AuditPart(f"CLIP {name}", audits[name]) for name in reference}
    trials: dict[str, dict[str, tuple[bool, str]]] = {name: {} for name in reference}
    for dtype in names:
        step(f"CLIP computed in {dtype}")
        with ExitStack() as stack:
            for name, encoder in encoders.items():
                stack.enter_context(_computing(encoder, DTYPES[dtype]))
                stack.enter_context(audits[name].lowered(dtype, _watched(encoder)))
            low = _encode(clip, prompt)
        for name, part in parts.items():
            errors = error_of(low[name], reference[name])
            sentence = describe_tensor_error(f"computed in {dtype}", errors, TEXT_LIMIT)
            part.sentences.append(sentence)
            trials[name][dtype] = (errors.relative <= TEXT_LIMIT, sentence)
            audited.differences.append((f"{name} computed in {dtype}", _plane(low[name][0] - reference[name][0])))
        step(f"CLIP stored in {dtype}")
        _stored(clip, prompt, dtype, encoders, reference, parts)
    native = native_support(clip.patcher.load_device, names)
    for name, part in parts.items():
        audited.parts.append(part)
        audited.compute[name] = choose(trials[name], native, part.layers)
        held = storage_name(storage_dtype_of(encoders[name], clip.patcher))
        audited.storage[name] = f"stored as loaded, in {held}"
        audited.notes.append(f"{name}: loaded in {held}, computed in FP32 by the host.")
    return audited


def _watched(encoder: Any) -> torch.nn.Module:
    """The part of an encoder whose output is used. Where the host takes the pooled output as it is (SD 1), a projection
    runs all the same, on weights that no file holds: they are what lay in memory, NaN too.
    """
    text_model = getattr(encoder.transformer, "text_model", None)
    return encoder.transformer if text_model is None or encoder.return_projected_pooled else text_model


def _encode(clip: Any, prompt: str) -> dict[str, list[Tensor]]:
    """What each encoder that took part gives for the prompt: the context, and the pooled output where there is one."""
    outputs: dict[str, list[Tensor]] = {}

    def note(name: str):
        def look(_module, _args, output):
            outputs[name] = [x.detach().float().cpu() for x in output[:2] if torch.is_tensor(x)]

        return look

    encoders = text_encoders(clip.cond_stage_model)
    handles = [encoder.register_forward_hook(note(name)) for name, encoder in encoders.items()]
    try:
        clip.encode_from_tokens(clip.tokenize(prompt), return_pooled=True)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


@contextmanager
def _computing(encoder: Any, dtype: torch.dtype) -> Iterator[None]:
    """Within the block, the encoder's transformer computes in `dtype` instead of the host's FP32."""

    def cast(_module, args, kwargs):
        embeds = kwargs.get("embeds")
        changed = {"dtype": dtype} if embeds is None else {"dtype": dtype, "embeds": embeds.to(dtype)}
        return args, {**kwargs, **changed}

    handle = encoder.transformer.register_forward_pre_hook(cast, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _stored(clip: Any, prompt: str, dtype: str, encoders: dict, reference: dict, parts: dict[str, AuditPart]) -> None:
    """A copy of all encoders in `dtype`, which lives as long as its one run."""
    if all(storage_dtype_of(encoder, clip.patcher) == DTYPES[dtype] for encoder in encoders.values()):
        for part in parts.values():
            part.sentences.append(f"stored in {dtype}: that is how it was loaded, so nothing is lost by it.")
        return
    try:
        private = copy_module(clip.cond_stage_model, clip.patcher, DTYPES[dtype])
    except BadInput as refused:
        for part in parts.values():
            part.sentences.append(f"stored in {dtype}: not measured, because {str(refused).rstrip('.')}.")
        return
    copied = clip.clone()
    copied.cond_stage_model = private
    copied.patcher = patcher_of_copy(clip.patcher, private, patched=True)
    copied.patcher.is_clip, copied.patcher.hook_mode = True, clip.patcher.hook_mode
    low = _encode(copied, prompt)
    for name, part in parts.items():
        errors = error_of(low[name], reference[name])
        part.sentences.append(describe_tensor_error(f"stored in {dtype}", errors, TEXT_LIMIT))


def _plane(context: Tensor) -> Tensor:
    """[1, tokens, dim], or several chunks of it -> [3, tokens, dim], to be looked at."""
    return repeat(context, "chunks tokens dim -> 3 (chunks tokens) dim")
