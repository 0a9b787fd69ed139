"""The moments of the host's own attention functions, in their steps: basic, split, sub-quadratic."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .attention_call import AttentionCall, Moment

__all__ = ["basic_attention", "split_attention", "split_steps", "sub_quadratic_attention", "sub_quadratic_chunk"]


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


def basic_attention(call: AttentionCall) -> Iterator[Moment]:
    """attention_basic: comfy/ldm/modules/attention.py"""
    qk, v = _sorted_by_head(call, always=True)
    scores = call.scores(call.q_tokens, call.k_tokens, call.score_bytes)
    half_copy = call.scores(call.q_tokens, call.k_tokens, call.element_bytes) if call.upcast else 0
    floats = (call.query + call.key) * 4 // call.element_bytes if call.upcast else 0
    yield {"copies": qk + v, "upcast": floats, "scores": scores}  # q k^T
    yield {"copies": qk + v, "scores": scores, "softmax": scores}  # * scale makes a second matrix; later the softmax
    yield {"copies": v, "softmax": scores + half_copy, "output": call.query}
    yield {"copies": v, "softmax": scores, "output": 2 * call.query}  # back to the caller's order


def split_steps(call: AttentionCall) -> int:
    """How often attention_split halves the queries: it wants 3 S bytes and asks how many are free."""
    need = 3 * call.scores(call.q_tokens, call.k_tokens, call.score_bytes)
    # halving while it is too much is 2^ceil(log2(need / free)) without a rounding error or a division by zero
    steps = 1
    while need > steps * call.free and steps <= 64:
        steps *= 2
    return steps


def split_attention(call: AttentionCall) -> Iterator[Moment]:
    """attention_split: comfy/ldm/modules/attention.py"""
    qk, v = _sorted_by_head(call, always=True)
    steps, n = split_steps(call), call.q_tokens
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


def sub_quadratic_chunk(call: AttentionCall) -> tuple[int, bool]:
    """(queries per chunk, whether the keys are cut too): attention_sub_quad takes the largest that fits 4 times."""
    for queries in (4096, 2048, 1024, 512, 256):
        if call.free >= 4 * call.scores(queries, call.k_tokens, call.score_bytes):
            return queries, False
    return 512, math.isqrt(call.k_tokens) < call.k_tokens


def sub_quadratic_attention(call: AttentionCall) -> Iterator[Moment]:
    """attention_sub_quad and comfy/ldm/modules/sub_quadratic_attention.py (arXiv:2112.05682)"""
    copies = sum(_sorted_by_head(call, always=False))
    chunk, by_key = sub_quadratic_chunk(call)
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
