"""What the attention block in the middle of a VAE allocates: one head, as wide as the channels, q, k, v as pictures.

Source: comfy/ldm/modules/diffusionmodules/model.py of the host. X is the bytes of q, N = height x width, S = b N^2 e.
"""

from __future__ import annotations

from .attention import attention_peak
from .attention_call import AttentionCall

__all__ = ["VAE_ATTENTION", "vae_attention_bytes"]

VAE_ATTENTION = ("split", "pytorch", "xformers")


def vae_attention_bytes(call: AttentionCall, backend: str) -> int:
    """Bytes beside q, k, v. call: one head, as many queries as keys; its `free` is what split cuts by."""
    picture = call.query
    if backend == "split":  # normal_attention, slice_attention
        return max(picture + moment for moment in _sliced(call))
    # pytorch_attention, xformers_attention: [b, c, N] is copied to [b, N, c] three times, and the result back
    copies = 3 * picture
    inside = attention_peak(call, backend).total - call.inputs
    return copies + max(inside, 2 * picture)


def _sliced(call: AttentionCall) -> tuple[int, int]:
    """slice_attention: scores and scaled scores, then scores and softmax; then softmax and the part of the result."""
    n, size = call.q_tokens, call.element_bytes
    scores = call.batch * n * n * size
    need = scores * (3 if size == 2 else 2.5)
    steps = 1
    while need > steps * call.free and steps < 2**20:
        steps *= 2
    part = n // steps if n % steps == 0 else n
    return 2 * call.batch * part * n * size, (call.batch * part * n + call.batch * call.head_dim * part) * size
