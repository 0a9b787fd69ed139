"""The moments of attention by a kernel: PyTorch's three, flash-attn, xformers, SageAttention."""

from __future__ import annotations

from collections.abc import Iterator

from .attention_call import AttentionCall, Moment

__all__ = ["flash_attention", "fused_attention", "math_attention", "sage_attention", "xformers_attention"]


def math_attention(call: AttentionCall) -> Iterator[Moment]:
    """_scaled_dot_product_attention_math: aten/src/ATen/native/transformers/attention.cpp

    Without `half_math` half precision is computed in FP32, and a half copy of the softmax is kept on top.
    """
    up = call.element_bytes == 2 and not call.half_math
    grow = 4 // call.element_bytes if up else 1
    query, key = call.query * grow, call.key * grow
    floats = query + 2 * key if up else 0
    copied = call.batch > 1 and call.heads > 1 and not call.split_heads
    scores = call.scores(call.q_tokens, call.k_tokens, call.element_bytes * grow)
    half_copy = scores // grow if up else 0
    v = key if call.batch > 1 and call.heads > 1 else 0
    yield {"upcast": floats, "copies": (2 if copied else 1) * (query + key), "scores": scores}
    yield {"upcast": floats, "copies": query, "scores": scores, "softmax": scores}
    held = {"upcast": floats, "softmax": scores + half_copy}
    yield {**held, "copies": query + v, "output": query}
    yield {**held, "copies": query, "output": query + (call.query if up else 0)}
    yield {"output": 2 * call.query}


def fused_attention(call: AttentionCall) -> Iterator[Moment]:
    """SDPA's flash and memory-efficient kernels: no scores at all, one FP32 row sum a query.

    On CUDA: heads padded to a multiple of 8 (pad_last_dim in attention.cpp); above 128 in half precision the
    memory-efficient kernel, which GPUs before Ampere take, accumulates in FP32; few queries are spread over the GPU by
    cutting the keys (_split_keys).
    """
    row_sums = call.rows * call.q_tokens * 4
    padded = _padded(call, 8) if call.gpu else 0
    workspace = row_sums + (max(_accumulator(call), _split_keys(call)) if call.gpu else 0)
    yield {"copies": padded, "output": call.query, "workspace": workspace}
    if call.split_heads and call.heads > 1:  # the result follows the order of q
        yield {"output": 2 * call.query}


def flash_attention(call: AttentionCall) -> Iterator[Moment]:
    """flash_attn_func (flash-attn 2): csrc/flash_attn/flash_api.cpp"""
    row_sums = call.rows * call.q_tokens * 4
    yield {"copies": _padded(call, 8), "output": call.query, "workspace": row_sums + _split_keys(call)}


def xformers_attention(call: AttentionCall) -> Iterator[Moment]:
    """memory_efficient_attention: its flash and cutlass operators; the cutlass one accumulates in FP32 above 128."""
    row_sums = call.rows * call.q_tokens * 4
    yield {"output": call.query, "workspace": row_sums + max(_accumulator(call), _split_keys(call))}


def sage_attention(call: AttentionCall) -> Iterator[Moment]:
    """sageattn: sageattention/core.py and quant.py, the largest of its variants.

    Heads padded to 64 or 128; q and k in INT8, k less its mean; v as FP16 and as FP8, keys padded to 128; scales and
    sums in FP32 at most one a query and key.
    """
    width = 64 if call.head_dim <= 64 else 128
    q, k = call.rows * call.q_tokens * width, call.rows * -(-call.k_tokens // 128) * 128 * width
    padded = (q + 2 * k) * call.element_bytes if width != call.head_dim else 0
    quantised = q + k + k * call.element_bytes + 2 * k + k
    sums = call.rows * (call.q_tokens + call.k_tokens) * 4
    output = q * call.element_bytes + (call.query if width != call.head_dim else 0)
    yield {"copies": padded + quantised, "workspace": sums, "output": output}
    yield {"output": 2 * call.query}


def _padded(call: AttentionCall, multiple: int) -> int:
    """Copies of q, k, v and of the output where the head size is no multiple."""
    width = -(-call.head_dim // multiple) * multiple
    if width == call.head_dim:
        return 0
    return (2 * call.rows * call.q_tokens + 2 * call.rows * call.k_tokens) * width * call.element_bytes


def _accumulator(call: AttentionCall) -> int:
    """The output in FP32, for half precision and heads above 128: kNeedsOutputAccumulatorBuffer in kernel_forward.h."""
    return call.query * 2 if call.element_bytes == 2 and call.head_dim > 128 else 0


def _split_keys(call: AttentionCall) -> int:
    """FP32 partial results where too few blocks of 64 queries would fill the GPU (flash_api.cpp: num_splits_heuristic).

    Bounded for 148 multiprocessors, 2 blocks each: some 10 MB at most, and none for large pictures.
    """
    slots = 2 * 148
    blocks = call.rows * -(-call.q_tokens // 64)
    if blocks >= 0.8 * slots:
        return 0
    by_key = -(-call.k_tokens // (256 if call.head_dim <= 64 else 128 if call.head_dim <= 128 else 64))
    splits = min(by_key, 128, slots // blocks + 1)
    width = -(-call.head_dim // 32) * 32
    return splits * call.rows * call.q_tokens * (width + 1) * 4 if splits > 1 else 0
