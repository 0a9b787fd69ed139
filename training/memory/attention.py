"""What one attention call allocates, in closed form, for each way in which ComfyUI can compute it.

A backend is a walk through *moments*: at each one some tensors are alive, each a named term in bytes. The peak is the
largest moment, so its terms sum to it exactly. Symbols: b batch, h heads, d head size, Nq and Nk queries and keys, e
bytes of an element, S = b h Nq Nk scores. The terms of a moment:

    inputs     q, k, v, which the caller holds                                b h (Nq + 2 Nk) d e
    copies     q, k, v sorted by head, scaled, padded or quantised
    upcast     q, k, v in FP32
    scores     q k^T                                                          S e, or S 4 where it is in FP32
    softmax    the second matrix of that size: the scaled scores, then the softmax; and its half-precision copy
    output     the result, and its copy in the caller's order
    workspace  row sums, partial results

Only tensors are counted, as PyTorch's dispatcher sees them: no allocator rounding (512 bytes a tensor on CUDA), no
scratch memory inside a matrix product, no attention mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import BadInput
from . import host_attention, kernel_attention
from .attention_call import AttentionCall, Moment

__all__ = ["BACKENDS", "MATERIALISED", "MEASURED", "TERMS", "AttentionCall", "Peak", "attention_peak", "score_matrices"]

TERMS = ("inputs", "copies", "upcast", "scores", "softmax", "output", "workspace")
BACKENDS = ("basic", "split", "sub-quadratic", "pytorch", "pytorch math", "flash", "xformers", "sage")
MATERIALISED = ("basic", "pytorch math")  # always hold all scores at once: quadratic in tokens
MEASURED = {  # against the allocation peak of the real functions, tests/host/test_attention_memory.py
    "basic": "measured on the CPU",
    "split": "measured on the CPU",
    "sub-quadratic": "measured on the CPU",
    "pytorch": "measured on the CPU, not measured on a GPU",
    "pytorch math": "measured on the CPU",
    "flash": "not measured",
    "xformers": "not measured",
    "sage": "not measured",
}


@dataclass(frozen=True)
class Peak:
    """The largest moment of a call. runs: the backend whose kernel really runs; notes: why it is another, chunks."""

    backend: str
    runs: str
    terms: Moment
    notes: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def total(self) -> int:
        return sum(self.terms.values())


def score_matrices(batch: int, heads: int, q_tokens: int, k_tokens: int, element_bytes: int) -> int:
    """2 b h Nq Nk e: what an attention that materialises its scores holds at least, in bytes."""
    return 2 * batch * heads * q_tokens * k_tokens * element_bytes


def attention_peak(call: AttentionCall, backend: str) -> Peak:
    """The peak of `call` on `backend`, one of BACKENDS, fallbacks included. BadInput for another name."""
    if backend not in BACKENDS:
        raise BadInput(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}.")
    runs, notes = _fallback(call, backend)
    refused = None
    if runs == "split":
        steps = host_attention.split_steps(call)
        if steps > 64:
            refused = "split attention would need more than 64 steps, which ComfyUI refuses"
        elif steps > 1 and call.q_tokens % steps:
            notes += (f"{call.q_tokens} tokens cannot be divided by {steps} steps, so split takes them all at once",)
        elif steps > 1:
            notes += (f"in {steps} steps",)
    if runs == "sub-quadratic":
        chunk, by_key = host_attention.sub_quadratic_chunk(call)
        if call.q_tokens > chunk or by_key:
            notes += (f"in chunks of {chunk} queries" + (f" and {math.isqrt(call.k_tokens)} keys" if by_key else ""),)
    moments = [{"inputs": call.inputs, **moment} for moment in _MOMENTS[runs](call)]
    most = max(moments, key=lambda moment: sum(moment.values()))
    return Peak(backend, runs, {term: most[term] for term in TERMS if most.get(term)}, notes, refused)


# ------------------------------------------------------------------------------------------------------- which kernel


def _fallback(call: AttentionCall, backend: str) -> tuple[str, tuple[str, ...]]:
    """The backend that really runs, and why it is not the one asked for.

    Sources: attention_sage and attention_flash in the host's comfy/ldm/modules/attention.py (any error -> SDPA);
    head sizes and dtypes in sageattention/core.py, flash_attn_interface.py, and PyTorch's
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (check_head_dim_size_flash, ..._mem_efficient).
    """
    notes: tuple[str, ...] = ()
    half, d = call.element_bytes == 2, call.head_dim
    limit = {"sage": 128, "flash": 256}.get(backend)
    if limit and (not half or d > limit):
        notes = (f"{backend} takes {f'heads up to {limit}, not {d}' if half else 'half precision only'}",)
        backend = "pytorch"
    if backend == "pytorch" and call.gpu and not (half and d <= 256) and d % (8 if half else 4):
        notes, backend = (*notes, f"no fused kernel takes heads of {d} in this precision"), "pytorch math"
    return backend, notes


_MOMENTS: dict[str, Callable[[AttentionCall], Iterator[Moment]]] = {
    "basic": host_attention.basic_attention,
    "split": host_attention.split_attention,
    "sub-quadratic": host_attention.sub_quadratic_attention,
    "pytorch": kernel_attention.fused_attention,
    "pytorch math": kernel_attention.math_attention,
    "flash": kernel_attention.flash_attention,
    "xformers": kernel_attention.xformers_attention,
    "sage": kernel_attention.sage_attention,
}
