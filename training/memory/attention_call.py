"""The question that attention's closed forms answer: sizes of q, k and v, and where they are computed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AttentionCall", "Moment"]

Moment = dict[str, int]  # term -> bytes that are alive at once


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function. element_bytes: 4, or 2 for half precision.

    upcast: basic, split and sub-quadratic compute the scores in FP32 (the host's `attn_precision`).
    split_heads: q, k, v come as [b, h, N, d] (Flux) and not as [b, N, h d] (UNets, SD3, Wan).
    half_math: PyTorch's math kernel may stay in half precision (`allow_fp16_bf16_reduction_math_sdp`, which ComfyUI
    turns on; PyTorch's own default is off). gpu: the kernels are those of CUDA, with their workspaces.
    free: bytes that the device has free when the call is made; split and sub-quadratic choose their chunks by it.
    """

    batch: int
    heads: int
    q_tokens: int
    k_tokens: int
    head_dim: int
    element_bytes: int
    upcast: bool = False
    split_heads: bool = False
    half_math: bool = True
    gpu: bool = True
    free: int = 2**63

    @property
    def rows(self) -> int:
        """b h"""
        return self.batch * self.heads

    @property
    def query(self) -> int:
        """Bytes of q, and of the output."""
        return self.rows * self.q_tokens * self.head_dim * self.element_bytes

    @property
    def key(self) -> int:
        """Bytes of k, and of v."""
        return self.rows * self.k_tokens * self.head_dim * self.element_bytes

    @property
    def inputs(self) -> int:
        return self.query + 2 * self.key

    @property
    def score_bytes(self) -> int:
        """Bytes of one score in the functions of the host."""
        return 4 if self.upcast else self.element_bytes

    def scores(self, queries: int, keys: int, size: int) -> int:
        """Bytes of a block of scores of `size` bytes each."""
        return self.rows * queries * keys * size
