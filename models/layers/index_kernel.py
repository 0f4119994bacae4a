"""The Triton kernel of ``index_logits``. Imported only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["begin", "end", "width", "tiles", "table_stride"])
def index_logits(  # type: ignore[no-untyped-def]
    query,
    weights,
    keys,
    scales,
    starts,
    positions,
    table,
    out,
    begin,
    end,
    width,
    tiles,
    table_stride,
    query_stride,
    weights_stride,
    ROW: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A tile ``[TOKENS, KEYS]`` of the logits of one request, of which each has ``tiles`` at most along its tokens.

    ``query`` float8 ``[tokens, HEADS, WIDTH]``, ``weights`` float32 ``[tokens, HEADS]``, ``keys`` float8 and ``scales``
    float32 by slot in rows of ``ROW`` bytes, ``starts`` int32 ``[requests + 1]``, ``positions`` int64 ``[tokens]``,
    ``table`` int32 ``[requests, pages]``, ``out`` float32 ``[end - begin, width]`` for tokens ``begin:end`` of the
    batch. What a token does not see gets -inf.
    """
    request = tl.program_id(0) // tiles
    stop = tl.minimum(tl.load(starts + request + 1), end)
    top = tl.load(starts + request) + tl.program_id(0) % tiles * TOKENS
    if (top < stop) & (top + TOKENS > begin):
        token = top + tl.arange(0, TOKENS)
        here = (token >= begin) & (token < stop)
        position = tl.load(positions + token, mask=here, other=-1)
        place = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
        column = tl.arange(0, WIDTH)
        last = tl.load(positions + tl.minimum(top + TOKENS, stop) - 1)
        # Not tl.zeros: that is written in Triton itself, and interpreted only if the interpreter was on at its import.
        logits = tl.full((TOKENS, KEYS), 0.0, tl.float32)
        if tl.program_id(1) * KEYS <= last:  # else no token sees any key
            # Without a mask: Triton would take what a masked load gives for aligned, and addresses are not.
            seen = tl.minimum(place, last)
            slot = tl.load(table + request * table_stride + seen // PAGE).to(tl.int64) * PAGE + seen % PAGE
            key = tl.load(keys + slot[None, :] * ROW + column[:, None])
            for head in range(HEADS):
                rows = tl.load(
                    query + token[:, None].to(tl.int64) * query_stride + head * WIDTH + column[None, :],
                    mask=here[:, None],
                    other=0.0,
                )
                weight = tl.load(weights + token * weights_stride + head, mask=here, other=0.0)
                logits += weight[:, None] * tl.maximum(tl.dot(rows, key), 0.0)
            logits *= tl.load(scales + slot * (ROW // 4))[None, :]
        logits = tl.where(place[None, :] <= position[:, None], logits, float("-inf"))
        into = out + (token - begin)[:, None].to(tl.int64) * width + place[None, :]
        tl.store(into, logits, mask=here[:, None] & (place[None, :] < width))
