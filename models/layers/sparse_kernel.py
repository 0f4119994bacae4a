"""The Triton kernel of ``sparse.fused_mla_attention``. Imported only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["most", "table_stride", "chosen_stride"])
def sparse_mla(  # type: ignore[no-untyped-def]
    q_latent,
    q_rotary,
    latents,
    rotary,
    chosen,
    owners,
    positions,
    table,
    out,
    most,
    table_stride,
    chosen_stride,
    token_stride,
    head_stride,
    rotary_token_stride,
    rotary_head_stride,
    out_token_stride,
    out_head_stride,
    scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """``ROWS`` heads of one token, over its chosen keys ``KEYS`` at a time, with the softmax kept up as they come.

    ``q_latent`` and ``out`` ``[tokens, HEADS, RANK]``, ``q_rotary`` ``[tokens, HEADS, ROTARY]``, ``latents`` and
    ``rotary`` by slot, ``chosen`` int32 ``[tokens, most]``, ``owners`` and ``positions`` int64 ``[tokens]``, ``table``
    int32 ``[requests, pages]``. ``scale`` is that of powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    rank, turned = tl.arange(0, RANK), tl.arange(0, ROTARY)
    live = head[:, None] < HEADS
    query = tl.load(q_latent + token * token_stride + head[:, None] * head_stride + rank[None, :], mask=live, other=0.0)
    turn = tl.load(
        q_rotary + token * rotary_token_stride + head[:, None] * rotary_head_stride + turned[None, :],
        mask=live,
        other=0.0,
    )
    position = tl.load(positions + token)
    pages = table + tl.load(owners + token) * table_stride
    # Not tl.zeros: that is written in Triton itself, and interpreted only if the interpreter was on at its import.
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    gathered = tl.full((ROWS, RANK), 0.0, tl.float32)
    for start in range(0, tl.minimum(position + 1, most), KEYS):  # what is chosen stands first, without gaps
        at = start + tl.arange(0, KEYS)
        place = tl.load(chosen + token * chosen_stride + at, mask=at < most, other=-1)
        seen = (place >= 0) & (place <= position)
        page = tl.load(pages + place // PAGE, mask=seen, other=0)
        slot = page.to(tl.int64) * PAGE + place % PAGE
        key = tl.load(latents + slot[:, None] * RANK + rank[None, :], mask=seen[:, None], other=0.0)
        key_turn = tl.load(rotary + slot[:, None] * ROTARY + turned[None, :], mask=seen[:, None], other=0.0)
        scores = (tl.dot(query, tl.trans(key)) + tl.dot(turn, tl.trans(key_turn))) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores - base[:, None])
        kept = tl.exp2(highest - base)
        total = total * kept + tl.sum(shares, 1)
        gathered = gathered * kept[:, None] + tl.dot(shares.to(key.dtype), key)
        highest = higher
    gathered /= tl.where(total == 0.0, 1.0, total)[:, None]
    into = out + token * out_token_stride + head[:, None] * out_head_stride + rank[None, :]
    tl.store(into, gathered.to(out.dtype.element_ty), mask=live)
