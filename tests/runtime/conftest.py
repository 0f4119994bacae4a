"""Each test starts from one state, and runs where nothing needs a gradient.

``padded(fn)`` compiles a function or module with a ladder and compares each call with eager code at the exact length.
Memory that nothing has written in a call holds rubbish in it (``poisoned``).
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import bcg_compiler as bcg
from bcg_compiler.runtime import arena
from bcg_compiler.runtime.capture import EmulatedCapture, emulated


@pytest.fixture(autouse=True)
def _clean(clean: None) -> None:
    """Each test begins anew."""


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each replay everything that a program holds is rubbish: NaN, and numbers that are no index.

    Left out are slots that are filled once.
    """
    held: list[weakref.ref[Tensor]] = []
    arenas: weakref.WeakSet[arena.Arena] = weakref.WeakSet()
    like, took = emulated._like, arena.Arena.__init__

    def of_pool(fake: Tensor) -> Tensor:
        made = like(fake)
        held.append(weakref.ref(made))
        _spoil(made)
        return made

    def register(self: arena.Arena) -> None:
        took(self)
        arenas.add(self)

    def spoil_all(self: EmulatedCapture) -> None:
        for ref in held:
            if (made := ref()) is not None:
                _spoil(made)
        for each in arenas:
            for name, storage in each._storages.items():
                if isinstance(name, tuple) or name.startswith("bridge"):
                    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)  # NaN, and -1

    monkeypatch.setattr(emulated, "_like", of_pool)
    monkeypatch.setattr(arena.Arena, "__init__", register)
    monkeypatch.setattr(EmulatedCapture, "before_replay", spoil_all)


def _spoil(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


class Padded:
    """A function or module and its compiled form with a ladder; ``open`` are the dimensions that are marked open.

    A call compares results (values, shapes, strides, dtypes, which of them share memory), the arguments and the state
    of the module with those of eager code at the exact length. ``close``: values may differ in their last bits.
    """

    def __init__(self, fn: Any, open: Any = 0, close: bool = False, fullgraph: bool = True, **options: Any) -> None:
        given = {"ladder": [8, 16, 32], "capture": "emulated", "min_segment_kernels": 1, **options}
        self.eager = copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn
        self.module = fn
        self.compiled = torch.compile(fn, backend="bcg", fullgraph=fullgraph, options=given)
        self.open = open
        self.close = close

    def __call__(self, *args: Any) -> Any:
        """One call of both with equal arguments; returns the compiled one's result."""
        mine, theirs = copy.deepcopy(args), copy.deepcopy(args)
        self.mark(mine)
        state = torch.get_rng_state()
        with bcg.forward_context(live_rows=self.rows(args)):
            want = self.eager(*theirs)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        got = self.compiled(*mine)
        assert torch.equal(torch.get_rng_state(), after), "the random state is not that of eager"
        self.same(got, want, "result")
        self.same(mine, theirs, "argument")
        self.same(_state(self.module), _state(self.eager), "state")
        shares = [_sharing([*_tensors(r), *_tensors(a)]) for r, a in ((got, mine), (want, theirs))]
        assert shares[0] == shares[1], f"results and arguments share memory like {shares[0]}, in eager {shares[1]}"
        return got

    def mark(self, args: Any) -> None:
        """Open the dimensions of the tensors among the arguments."""
        for position, arg in enumerate(_tensors(args)):
            dims = self.open[position] if isinstance(self.open, (list, dict)) else self.open
            open_ = [dim for dim in (dims if isinstance(dims, tuple) else (dims,)) if dim is not None]
            for dim in open_:
                torch._dynamo.mark_dynamic(arg, dim)
            # Dynamo remembers the sizes of other tests' calls of a function, and opens what has differed.
            for dim in set(range(arg.dim())) - {dim % arg.dim() for dim in open_} if open_ else ():
                torch._dynamo.mark_static(arg, dim)

    def rows(self, args: Any) -> int:
        """The live rows of a call: by the first dimension that is open."""
        for position, arg in enumerate(_tensors(args)):
            dims = self.open[position] if isinstance(self.open, (list, dict)) else self.open
            dim = dims[0] if isinstance(dims, tuple) else dims
            if dim is not None:
                return int(arg.shape[dim])
        raise AssertionError("nothing is open")

    def same(self, got: Any, want: Any, what: str) -> None:
        """Alike in structure, type, shape, strides, dtype and values."""
        got, want = tree_leaves(got), tree_leaves(want)
        assert len(got) == len(want), what
        for one, other in zip(got, want, strict=True):
            assert type(one) is type(other), what
            if not isinstance(other, Tensor):
                assert one == other, what
                continue
            assert (one.shape, one.dtype) == (other.shape, other.dtype), what
            told = [d for d in range(other.dim()) if other.numel() and other.shape[d] > 1]
            strides = [[t.stride(d) for d in told] for t in (one, other)]
            assert strides[0] == strides[1], f"{what}: strides {one.stride()}, in eager {other.stride()}"
            if self.close:
                torch.testing.assert_close(one, other, msg=lambda text: f"{what}: {text}", equal_nan=True)
            else:
                equal = torch.equal(one.nan_to_num(nan=7.5e5), other.nan_to_num(nan=7.5e5))
                assert equal, f"{what}: {one} instead of {other}"

    @property
    def stats(self) -> Any:
        """What happened so far."""
        return bcg.stats(self.compiled)

    @property
    def plan(self) -> Any:
        """The plan of the last program."""
        return self.program.plan

    @property
    def program(self) -> Any:
        """The last program."""
        return bcg.programs_of(self.compiled)[-1]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _sharing(tensors: list[Tensor]) -> list[int]:
    first: dict[int, int] = {}
    return [first.setdefault(t.untyped_storage()._cdata, index) for index, t in enumerate(tensors)]


def _state(module: Any) -> dict[str, Tensor]:
    if not isinstance(module, nn.Module):
        return {}
    held = {f"{path}.{key}": v for path, m in module.named_modules() for key, v in vars(m).items() if key[0] != "_"}
    return {**module.state_dict(), **{k: v for k, v in held.items() if isinstance(v, (Tensor, int, float))}}


@pytest.fixture
def padded() -> Callable[..., Padded]:
    """``padded(fn, open=0, close=False, **options)``: see ``Padded``."""
    return Padded
