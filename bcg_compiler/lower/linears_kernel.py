"""The Triton kernel of ``linears``. Imported only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def linears(  # type: ignore[no-untyped-def]
    x,
    weight0,
    weight1,
    weight2,
    weight3,
    bias0,
    bias1,
    bias2,
    bias3,
    out0,
    out1,
    out2,
    out3,
    columns0,
    columns1,
    columns2,
    columns3,
    stride0,
    stride1,
    stride2,
    stride3,
    rows,
    depth,
    stride,
    COUNT: tl.constexpr,
    BIASED: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """``out = x @ weight.T (+ bias)`` for the first ``COUNT`` of them, a tile [ROWS, COLUMNS] of one of them a program.

    x [rows, depth] and weights [columns, depth] have one element behind the other in a row, and a row each ``stride``;
    out [rows, columns] is contiguous, bias [columns]. ``WHOLE``: ``depth`` is a multiple of ``DEPTH``.
    """
    program = tl.program_id(0)
    down = tl.cdiv(rows, ROWS)
    tile = program // down  # programs of one tile of a weight stand beside each other, for the cache
    weight, bias, out, columns, weight_stride = weight0, bias0, out0, columns0, stride0
    if COUNT > 1:
        before = tl.cdiv(columns0, COLUMNS)
        if tile >= before:
            tile -= before
            weight, bias, out, columns, weight_stride = weight1, bias1, out1, columns1, stride1
            if COUNT > 2:
                before = tl.cdiv(columns1, COLUMNS)
                if tile >= before:
                    tile -= before
                    weight, bias, out, columns, weight_stride = weight2, bias2, out2, columns2, stride2
                    if COUNT > 3:
                        before = tl.cdiv(columns2, COLUMNS)
                        if tile >= before:
                            tile -= before
                            weight, bias, out, columns, weight_stride = weight3, bias3, out3, columns3, stride3
    row = (program % down) * ROWS + tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    # Programs at the edges read rows and columns again, and do not store what they make of them: loads without a mask
    # are a quarter faster. Not the first one again and again, which all programs would wait for.
    left = x + (row % rows).to(tl.int64)[:, None] * stride + at[None, :]
    right = weight + (column % columns).to(tl.int64)[None, :] * weight_stride + at[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for done in range(0, depth, DEPTH):
        if WHOLE:
            total = tl.dot(tl.load(left), tl.load(right), total)
        else:
            rest = at < depth - done
            total = tl.dot(tl.load(left, rest[None, :], 0.0), tl.load(right, rest[:, None], 0.0), total)
        left += DEPTH
        right += DEPTH
    if BIASED:
        total += tl.load(bias + column, column < columns, 0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), inside)
