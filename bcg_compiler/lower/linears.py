"""Several products of one input: small ones in one launch, by a Triton kernel, and large ones by cuBLAS one by one."""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: The kernel takes so many products.
MOST = 4

#: What it multiplies, adding up in float32 as cuBLAS does. (How float32 itself is multiplied is the user's choice.)
DTYPES = (torch.bfloat16, torch.float16)

#: A row of so many elements, or of a multiple, is read 16 bytes at a time.
ALIGNED = 16


class Tile(NamedTuple):
    """What one program of the kernel computes of a result, ``depth`` elements of the sums at a time, of which so many
    ``stages`` are under way.
    """

    rows: int
    columns: int
    depth: int
    stages: int

    def programs(self, rows: int, columns: Sequence[int]) -> int:
        """How many make results of ``rows`` and these ``columns``."""
        return -(-rows // self.rows) * sum(-(-wide // self.columns) for wide in columns)

    @property
    def shared_bytes(self) -> int:
        """The shared memory that a program needs."""
        return 2 * (self.rows + self.columns) * self.depth * self.stages


#: From the smallest on: the first whose tiles are all computed at once was the fastest of ten, or nearly, in 49 groups
#: of 2 to 4 products, 16 to 2048 rows and 1024 to 4096 deep; where no tile is, cuBLAS was (one H200).
TILES = (Tile(16, 32, 128, 4), Tile(64, 32, 128, 4), Tile(64, 64, 128, 4), Tile(64, 128, 64, 4), Tile(128, 128, 64, 4))


class _Limits(NamedTuple):
    """How many programs a GPU runs at once, and the shared memory that one may have, in bytes."""

    programs: int
    shared_bytes: int


@cache
def _limits(device: torch.device) -> _Limits | None:
    """Those of a device; ``None`` for a CPU, for a GPU that does not multiply bfloat16 (before 8.0), without Triton."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    seen: Any = torch.cuda.get_device_properties(device)
    return _Limits(seen.multi_processor_count, seen.shared_memory_per_block_optin) if seen.major >= 8 else None


class Launch(NamedTuple):
    """Products that are one launch, by position."""

    products: tuple[int, ...]
    tile: Tile


def launches(rows: int, columns: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Launch]:
    """Which products of so many rows and columns are launched together: the narrowest, and those that are not in any
    launch are too wide to gain by it.
    """
    limits = _limits(device) if dtype in DTYPES else None
    found: list[Launch] = []
    left = sorted(range(len(columns)), key=columns.__getitem__)
    while limits is not None and len(left) > 1:
        fitting = (
            Launch(tuple(left[:count]), tile)
            for count in range(min(MOST, len(left)), 1, -1)
            for tile in TILES
            if tile.programs(rows, [columns[at] for at in left[:count]]) <= limits.programs
            and tile.shared_bytes <= limits.shared_bytes
        )
        launch = next(fitting, None)
        if launch is None:
            break
        found.append(launch)
        del left[: len(launch.products)]
    return found


@torch.library.custom_op("bcg_compiler::linears", mutates_args=())
def linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """``F.linear(x, weight, bias)`` for each weight [N, K] and bias [N] or ``None``; x [..., K].

    On CUDA, small ones are launched together.
    """
    results = _results(x, weights)
    rows = x.flatten(0, -2)
    outs = [result.flatten(0, -2) for result in results]
    alone = set(range(len(weights)))
    if _are_read_fast(rows, weights):
        for launch in launches(len(rows), [len(weight) for weight in weights], x.dtype, x.device):
            _launch(launch, rows, weights, biases, outs)
            alone -= set(launch.products)
    for at in sorted(alone):
        if (bias := biases[at]) is None:
            torch.mm(rows, weights[at].t(), out=outs[at])
        else:
            torch.addmm(bias, rows, weights[at].t(), out=outs[at])
    return results


@linears.register_fake
def _results(x: Tensor, weights: list[Tensor], biases: Any = None) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


def _are_read_fast(rows: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the kernel is any good for these: there are elements, and their rows are aligned."""
    aligned = (of.stride(1) == 1 and of.stride(0) % ALIGNED == of.shape[1] % ALIGNED == 0 for of in (rows, *weights))
    return rows.numel() > 0 and all(aligned)


def compile_for(x: Tensor, weights: Sequence[Tensor], biased: bool) -> None:
    """Compile the kernels that ``linears`` launches for what looks like these fakes, of known sizes, and load them."""
    rows = x.flatten(0, -2)
    if not _are_read_fast(rows, weights):
        return
    memory = torch.empty(1, dtype=x.dtype, device=x.device)
    for launch in launches(len(rows), [len(weight) for weight in weights], x.dtype, x.device):
        given = [(memory, memory, memory, len(weights[at]), weights[at].stride(0)) for at in launch.products]
        _run(0, launch.tile, memory, rows, given, biased)


def _launch(
    launch: Launch,
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outs: Sequence[Tensor],
) -> None:
    biased = any(biases[at] is not None for at in launch.products)
    given = []
    for at in launch.products:
        weight, added = weights[at], biases[at]
        if biased:
            added = weight.new_zeros(1) if added is None else added
            added = added.expand(len(weight)).contiguous()  # it may be of one element, or every other one of another
        given.append((weight, weight if added is None else added, outs[at], len(weight), weight.stride(0)))
    programs = launch.tile.programs(len(rows), [len(weights[at]) for at in launch.products])
    _run(programs, launch.tile, rows, rows, given, biased)


def _run(
    programs: int,
    tile: Tile,
    x: Tensor,
    rows: Tensor,
    given: Sequence[tuple[Tensor, Tensor, Tensor, int, int]],
    biased: bool,
) -> None:
    """Run so many programs of the kernel, 0 to have it compiled and loaded alone, on the memory of ``x``, which looks
    like ``rows``, and for each product of weight, bias and result, the columns of that, and the stride of the weight.
    """
    from bcg_compiler.lower.linears_kernel import linears as kernel

    all_given = [*given, *[given[-1]] * (MOST - len(given))]
    with torch.cuda.device(x.device):
        kernel[(programs,)](
            x,
            *chain(*zip(*all_given, strict=True)),
            *rows.shape,
            rows.stride(0),
            COUNT=len(given),
            BIASED=biased,
            WHOLE=rows.shape[1] % tile.depth == 0,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            num_warps=4,
            num_stages=tile.stages,
        )
