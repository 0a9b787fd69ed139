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

Moment = dict[str, int]


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
        steps = _split_steps(call)
        if steps > 64:
            refused = "split attention would need more than 64 steps, which ComfyUI refuses"
        elif steps > 1 and call.q_tokens % steps:
            notes += (f"{call.q_tokens} tokens cannot be divided by {steps} steps, so split takes them all at once",)
        elif steps > 1:
            notes += (f"in {steps} steps",)
    if runs == "sub-quadratic":
        chunk, by_key = _sub_quadratic_chunk(call)
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


# ---------------------------------------------------------------------------------------- the host's own, in its steps


def _sorted_by_head(call: AttentionCall, always: bool) -> tuple[int, int]:
    """Bytes of the copies of (q and k, v) as [b h, N, d].

    [b, N, h d] -> [b h, N, d] is a copy for more than one picture and more than one head; basic and split ask for
    contiguous memory and copy for one picture too (`always`). From [b, h, N, d] only v is copied: a view of the fused
    projection.
    """
    if call.split_heads:
        return 0, call.key if call.batch > 1 else 0
    if call.heads == 1 or (call.batch == 1 and not always):
        return 0, 0
    return call.query + call.key, call.key


def _basic(call: AttentionCall) -> Iterator[Moment]:
    """attention_basic: comfy/ldm/modules/attention.py"""
    qk, v = _sorted_by_head(call, always=True)
    scores = call.scores(call.q_tokens, call.k_tokens, call.score_bytes)
    half_copy = call.scores(call.q_tokens, call.k_tokens, call.element_bytes) if call.upcast else 0
    floats = (call.query + call.key) * 4 // call.element_bytes if call.upcast else 0
    yield {"copies": qk + v, "upcast": floats, "scores": scores}  # q k^T
    yield {"copies": qk + v, "scores": scores, "softmax": scores}  # * scale makes a second matrix; later the softmax
    yield {"copies": v, "softmax": scores + half_copy, "output": call.query}
    yield {"copies": v, "softmax": scores, "output": 2 * call.query}  # back to the caller's order


def _split_steps(call: AttentionCall) -> int:
    """How often attention_split halves the queries: it wants 3 S bytes and asks how many are free."""
    need = 3 * call.scores(call.q_tokens, call.k_tokens, call.score_bytes)
    # halving while it is too much is 2^ceil(log2(need / free)) without a rounding error or a division by zero
    steps = 1
    while need > steps * call.free and steps <= 64:
        steps *= 2
    return steps


def _split(call: AttentionCall) -> Iterator[Moment]:
    """attention_split: comfy/ldm/modules/attention.py"""
    qk, v = _sorted_by_head(call, always=True)
    steps, n = _split_steps(call), call.q_tokens
    held = {"copies": qk + v}
    if steps > 64:  # refused before the first scores
        yield {**held, "output": call.query}
        return
    queries = n // steps if n % steps == 0 else n
    scores = call.scores(queries, call.k_tokens, call.score_bytes)
    half_copy = call.scores(queries, call.k_tokens, call.element_bytes) if call.upcast else 0
    part = call.query * queries // n
    floats = (part + call.key) * 4 // call.element_bytes if call.upcast else 0
    yield {**held, "upcast": floats, "scores": scores, "output": call.query}
    yield {**held, "scores": scores, "softmax": scores + half_copy, "output": call.query}
    yield {**held, "softmax": half_copy or scores, "output": call.query + part}
    yield {"output": 2 * call.query}


def _sub_quadratic_chunk(call: AttentionCall) -> tuple[int, bool]:
    """(queries per chunk, whether the keys are cut too): attention_sub_quad takes the largest that fits 4 times."""
    for queries in (4096, 2048, 1024, 512, 256):
        if call.free >= 4 * call.scores(queries, call.k_tokens, call.score_bytes):
            return queries, False
    return 512, math.isqrt(call.k_tokens) < call.k_tokens


def _sub_quadratic(call: AttentionCall) -> Iterator[Moment]:
    """attention_sub_quad and comfy/ldm/modules/sub_quadratic_attention.py (arXiv:2112.05682)"""
    copies = sum(_sorted_by_head(call, always=False))
    chunk, by_key = _sub_quadratic_chunk(call)
    n, per_query = call.q_tokens, call.rows * call.head_dim * call.element_bytes
    inner = _chunk_by_key if by_key else _chunk_of_queries
    full, rest = divmod(n, chunk)
    last = [(rest, full * chunk)] if rest else []
    for queries, done in [*([(chunk, (full - 1) * chunk)] if full else []), *last]:
        for moment in inner(call, queries):
            yield {**moment, "copies": copies, "output": moment["output"] + done * per_query}
    yield {"copies": copies, "output": 2 * call.query}  # the chunks joined, or the result in the caller's order


def _chunk_of_queries(call: AttentionCall, queries: int) -> Iterator[Moment]:
    """_get_attention_scores_no_kv_chunking"""
    scores = call.scores(queries, call.k_tokens, call.score_bytes)
    half_copy = call.scores(queries, call.k_tokens, call.element_bytes) if call.upcast else 0
    part = call.rows * queries * call.head_dim * call.element_bytes
    floats = (part + call.key) * 4 // call.element_bytes if call.upcast else 0
    yield {"upcast": floats, "scores": scores, "softmax": scores, "output": 0}
    yield {"upcast": floats, "softmax": scores + half_copy, "output": part}


def _chunk_by_key(call: AttentionCall, queries: int) -> Iterator[Moment]:
    """_summarize_chunk and _query_chunk_attention: all partial results of a query chunk wait until they are joined."""
    keys = math.isqrt(call.k_tokens)
    count = -(-call.k_tokens // keys)
    rows, e, p = call.rows * queries, call.element_bytes, call.score_bytes
    values, sums, maxima, indices = rows * call.head_dim * e, rows * e, rows * p, rows * 8
    each = values + sums + maxima
    block = call.scores(queries, keys, p)
    upcast = (rows + call.rows * keys) * call.head_dim * 4 if call.upcast else 0
    half_copy = call.scores(queries, keys, e) + rows * p if call.upcast else 0
    counters = 8 * count + 16  # the chunk numbers are a tensor too
    waiting = (count - 1) * each + counters
    yield {"upcast": upcast, "scores": block, "softmax": half_copy, "workspace": waiting + each + indices, "output": 0}
    joined = 2 * count * each + maxima + indices
    yield {"workspace": joined + 2 * count * maxima, "output": 0}
    yield {"workspace": joined + count * maxima + values + sums, "output": values}


# -------------------------------------------------------------------------------------------------- PyTorch and beyond


def _math(call: AttentionCall) -> Iterator[Moment]:
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


def _fused(call: AttentionCall) -> Iterator[Moment]:
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


def _flash(call: AttentionCall) -> Iterator[Moment]:
    """flash_attn_func (flash-attn 2): csrc/flash_attn/flash_api.cpp"""
    row_sums = call.rows * call.q_tokens * 4
    yield {"copies": _padded(call, 8), "output": call.query, "workspace": row_sums + _split_keys(call)}


def _xformers(call: AttentionCall) -> Iterator[Moment]:
    """memory_efficient_attention: its flash and cutlass operators; the cutlass one accumulates in FP32 above 128."""
    row_sums = call.rows * call.q_tokens * 4
    yield {"output": call.query, "workspace": row_sums + max(_accumulator(call), _split_keys(call))}


def _sage(call: AttentionCall) -> Iterator[Moment]:
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


_MOMENTS: dict[str, Callable[[AttentionCall], Iterator[Moment]]] = {
    "basic": _basic,
    "split": _split,
    "sub-quadratic": _sub_quadratic,
    "pytorch": _fused,
    "pytorch math": _math,
    "flash": _flash,
    "xformers": _xformers,
    "sage": _sage,
}
