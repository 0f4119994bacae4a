"""Every option of ``torch.compile(..., backend="bcg", options={...})``: name, type, default, meaning."""

import dataclasses
import os
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from bcg_compiler.buckets import Ladder, Limits, SlotPolicy
from bcg_compiler.errors import LadderError, OptionError, nearest

#: What ``torch.compile`` itself takes out of the options dictionary and never hands to a backend.
TAKEN_BY_TORCH = frozenset({"guard_filter_fn", "use_aoti"})

#: Values of ``torch.compile(mode=...)`` that mean this backend's one way of working.
MODES = frozenset({"default", "reduce-overhead"})

#: A rule: a string (``op:``, ``module:``, ``class:``) or a predicate over the facts of a node.
Rule = str | Callable[..., bool]


@dataclass(frozen=True)
class Options:
    """The options of one compile.

    Raises ``OptionError`` (from ``Options.parse``) for an unknown name, with the nearest known one, or a wrong type.
    """

    capture: Literal["auto", "cuda", "emulated", "off"] = "auto"
    """What segments are captured on. ``"cuda"``: real graphs; ``"emulated"``: any device, to see the faults of graphs
    without one; ``"auto"``: by the device the graph computes on; ``"off"``: every step runs eagerly."""

    max_captures: int = 32
    """How many captures one program keeps, over all shapes and sets of addresses. Beyond it a call runs eagerly."""

    breaks: tuple[Rule, ...] = ()
    """Rules for what else is a break: ``"op:ns::name[.overload]"``, ``"module:<glob over the module path>"``,
    ``"class:<module class name>"``, or a predicate ``f(facts: NodeFacts) -> bool``. A rule that matches nothing is
    an error."""

    mark: tuple[str, ...] = ()
    """Parts of a model to make breaks although a graph could hold them: ``"attention"``, ``"dsa_indexer"``,
    ``"logits_gate"``, ``"a2a_moe"``. What is declared with ``@eager_break(reason=...)`` needs no mark."""

    dual_stream: bool = False
    """Whether what the forward does on a second stream is captured on a second stream. By default it runs on the
    caller's. Your word that nothing outside of the model waits for that stream, or puts work on it for the model."""

    ladder: Ladder | None = None
    """The row counts that inputs of any length are padded to, or a list of them. Used where it is shown from the graph
    that padding cannot reach live rows; elsewhere each shape is captured exactly, and ``explain`` says why."""

    token_dim: int | str | None = None
    """Which size the ladder is for, where a graph leaves several open: a dimension of its inputs (``1``), or one of a
    named input (``"input_ids:1"``)."""

    specialized_buckets: tuple[int, ...] = ()
    """Buckets of the ladder whose units are compiled for exactly their sizes, each at its capture, by the segment
    compiler. All others share code in which the sizes are open."""

    bucket_multiple: int = 1
    """Every bucket is rounded up to a multiple of this, and of what break functions declare (8 for DeepEP: other sizes
    can hang its capture)."""

    max_padding_factor: float = 2.0
    """A bucket larger than so many times the live rows is not used, the first bucket excepted."""

    limits: Limits = field(default_factory=Limits)
    """What else a batch must be to be replayed, for calls that publish one (``bcg.forward_context(batch=...)``), with
    vetoes of your own."""

    assume_rows_independent: bool = False
    """Your word, in place of a proof, that no live row depends on a padded one."""

    slots: Mapping[str, SlotPolicy] = field(default_factory=dict)
    """What stands in the padded rows of an input, by its name: ``"zero"`` (the default), ``"keep"``, a number, or
    ``"once"`` for an input that holds the same values at each call and is copied once."""

    on_late_capture: Literal["capture", "eager", "error"] = "capture"
    """What a call does after ``bcg.capture`` whose bucket is not captured."""

    outputs: Literal["copy", "alias"] = "copy"
    """``"alias"`` hands results out as they lie in the memory of the program, where the next call overwrites them."""

    capturable: tuple[str, ...] = ()
    """Custom ops (``"ns::name"``) and Python functions (``"package.module.function"``) that are safe to capture: they
    neither synchronise, nor read sizes or state on the host. They stay in segments."""

    segment_compiler: Literal["auto", "eager", "inductor"] | Callable[..., Any] = "auto"
    """What compiles the units of segments. ``"eager"``: nobody, their operations run as they are and give eager's bits;
    ``"inductor"``; or a function of a graph, which returns a tuple, and of fakes of its inputs, that returns what is
    called in its place. ``"auto"`` is ``"inductor"`` on
    CUDA where Triton is installed, and ``"eager"`` elsewhere."""

    min_segment_kernels: Literal["auto"] | int = "auto"
    """A segment with fewer kernels than this joins the break beside it; with ``"auto"`` one that costs more as a graph,
    with what is copied for it, than its operations cost eagerly. A segment without any kernel always does."""

    disable_passes: tuple[str, ...] = ()
    """Passes to leave out, by name (see ``docs/passes``)."""

    dump: str | None = None
    """A folder to write each graph, what passes did to it, its plan and its code to (see ``docs/dumps.md``). By default
    the one of the environment variable ``BCG_DUMP``; ``""`` for none."""

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None = None) -> "Options":
        """Build the options from the dictionary that ``torch.compile`` passes on; every value is checked."""
        if not isinstance(given, Mapping | None):
            raise OptionError(f"options is a {type(given).__qualname__}, and must be a dictionary of names and values.")
        values: dict[str, Any] = {}
        hints = typing.get_type_hints(cls)
        for name, value in (given or {}).items():
            if name in TAKEN_BY_TORCH:
                continue
            if name not in hints:
                raise OptionError(f"Unknown option {name!r}. {nearest(name, hints)}")
            values[name] = _PARSERS[name](value) if name in _PARSERS else _checked(name, value, hints[name])
        return cls(**values)


def check_mode(mode: str | None) -> None:
    """Refuse a ``torch.compile(mode=...)`` that would promise what this backend does not do."""
    if mode is not None and mode not in MODES:
        raise OptionError(
            f"mode={mode!r} is not a mode of the bcg backend. Leave it out, or give 'default' or 'reduce-overhead' "
            f"(both mean the same here); everything else is set by options={{...}}."
        )


def _checked(name: str, value: Any, hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in args:
            raise OptionError(f"Option {name!r} is {value!r}; it must be one of {', '.join(map(repr, args))}.")
        return value
    if origin is tuple:
        if isinstance(value, str) or callable(value):
            value = (value,)
        if not isinstance(value, (list, tuple, set, frozenset)):
            raise _wrong_type(name, value, "a list")
        allows_callables = args[0] == Rule
        for item in value:
            if not (isinstance(item, str) or (allows_callables and callable(item))):
                raise _wrong_type(name, value, "a list of strings" + (" and predicates" if allows_callables else ""))
        return tuple(value)
    if hint is bool and not isinstance(value, bool):
        raise _wrong_type(name, value, "True or False")
    # bool is an int in Python, but True is never meant as a number here.
    if hint is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise _wrong_type(name, value, "an integer")
    if hint is int and value < 0:
        raise OptionError(f"Option {name!r} is {value}; it must not be negative.")
    return value


def _ladder(value: Any) -> Ladder | None:
    if value is None or isinstance(value, Ladder):
        return value
    try:
        return Ladder(value)
    except LadderError as error:
        raise OptionError(f"Option 'ladder' is {value!r:.200}: {error}") from error


def _token_dim(value: Any) -> int | str | None:
    if isinstance(value, bool) or not isinstance(value, (int, str, type(None))):
        raise _wrong_type("token_dim", value, "a dimension, or 'name:dimension' of an input")
    if isinstance(value, str) and not value.rpartition(":")[2].lstrip("-").isdigit():
        raise OptionError(f"Option 'token_dim' is {value!r}; write the name of an input, a colon, and a dimension.")
    return value


def _multiple(value: Any) -> int:
    found: int = _checked("bucket_multiple", value, int)
    if found < 1:
        raise OptionError(f"Option 'bucket_multiple' is {found}; it must be at least 1.")
    return found


def _least_kernels(value: Any) -> Any:
    if isinstance(value, bool) or not (isinstance(value, int) or value == "auto"):
        raise _wrong_type("min_segment_kernels", value, "an integer, or 'auto'")
    return value if value == "auto" else _checked("min_segment_kernels", value, int)


def _buckets(value: Any) -> tuple[int, ...]:
    rows = (value,) if isinstance(value, int) else value
    if not isinstance(rows, (list, tuple, set, frozenset)) or not all(type(row) is int for row in rows):
        raise _wrong_type("specialized_buckets", value, "a list of buckets of the ladder")
    return tuple(rows)


def _padding_factor(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong_type("max_padding_factor", value, "a number")
    if not value >= 1:
        raise OptionError(f"Option 'max_padding_factor' is {value}; it must be at least 1: no padding at all.")
    return float(value)


def _slots(value: Any) -> Mapping[str, SlotPolicy]:
    if not isinstance(value, Mapping):
        raise _wrong_type("slots", value, "a dictionary from names of inputs to policies")
    return MappingProxyType({str(name): SlotPolicy.parse(str(name), given) for name, given in value.items()})


def _segment_compiler(value: Any) -> Any:
    if not callable(value) and value not in ("auto", "eager", "inductor"):
        raise _wrong_type("segment_compiler", value, "'auto', 'eager', 'inductor', or a function")
    return value


def _dump(value: Any) -> str | None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise _wrong_type("dump", value, "a folder")
    return value if value is None else os.fspath(value)


def _limits(value: Any) -> Limits:
    if not isinstance(value, Limits):
        raise _wrong_type("limits", value, "a bcg_compiler.Limits")
    return value


#: Options that are more than their type.
_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "ladder": _ladder,
    "token_dim": _token_dim,
    "specialized_buckets": _buckets,
    "bucket_multiple": _multiple,
    "max_padding_factor": _padding_factor,
    "slots": _slots,
    "segment_compiler": _segment_compiler,
    "min_segment_kernels": _least_kernels,
    "limits": _limits,
    "dump": _dump,
}


def _wrong_type(name: str, value: Any, wanted: str) -> OptionError:
    return OptionError(f"Option {name!r} is {value!r} ({type(value).__name__}); it must be {wanted}.")


def names() -> tuple[str, ...]:
    """The names of all options, in the order of their definition."""
    return tuple(f.name for f in dataclasses.fields(Options))
