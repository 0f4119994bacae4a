"""The Triton kernel of ``index_logits``. Imported only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens", "context", "first"])
def index_logits(  # type: ignore[no-untyped-def]
    query,
    weights,
    keys,
    scales,
    slots,
    out,
    tokens,
    context,
    first,
    query_stride,
    weights_stride,
    out_stride,
    ROW: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A tile ``[TOKENS, KEYS]`` of the logits of one request.

    ``query`` float8 ``[tokens, HEADS, WIDTH]``, ``weights`` float32 ``[tokens, HEADS]``, ``keys`` float8 and ``scales``
    float32 by slot in rows of ``ROW`` bytes, ``slots`` int64 ``[context]``, ``out`` float32 ``[tokens, context]``.
    Token 0 is at place ``first``; what a token does not see gets -inf.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    column = tl.arange(0, WIDTH)
    # Not tl.zeros: that is written in Triton itself, and interpreted only if the interpreter was on at its import.
    logits = tl.full((TOKENS, KEYS), 0.0, tl.float32)
    if tl.program_id(1) * KEYS < first + (tl.program_id(0) + 1) * TOKENS:  # else no token sees any key
        slot = tl.load(slots + place, mask=place < context, other=0)
        key = tl.load(keys + slot[None, :] * ROW + column[:, None])
        for head in range(HEADS):
            rows = tl.load(
                query + token[:, None].to(tl.int64) * query_stride + head * WIDTH + column[None, :],
                mask=token[:, None] < tokens,
                other=0.0,
            )
            weight = tl.load(weights + token * weights_stride + head, mask=token < tokens, other=0.0)
            logits += weight[:, None] * tl.maximum(tl.dot(rows, key), 0.0)
        logits *= tl.load(scales + slot * (ROW // 4))[None, :]
    logits = tl.where(place[None, :] <= first + token[:, None], logits, float("-inf"))
    kept = (token[:, None] < tokens) & (place[None, :] < context)
    tl.store(out + token[:, None].to(tl.int64) * out_stride + place[None, :], logits, mask=kept)
