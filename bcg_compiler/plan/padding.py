"""Whether and how a plan uses the ladder: which size is padded, by which proof, and what speaks against it.

What stands here are necessities that no word of the user's overrides; the proof about rows is that of ``facts.rows``.
"""

import cmath
import math
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from bcg_compiler.buckets import SlotPolicy
from bcg_compiler.errors import OptionError, nearest
from bcg_compiler.facts import Reason, RowVerdict, TensorSpec
from bcg_compiler.options import Options
from bcg_compiler.plan.plan import Padding, Plan, Value
from bcg_compiler.plan.rules import BrokenRule, Configuration
from bcg_compiler.plan.rules import evaluate as evaluate_rules
from bcg_compiler.plan.sizes import symbols_in


def choose_padding(
    options: Options,
    values: Mapping[int, Value],
    verdicts: Sequence[RowVerdict],
    conditions: Iterable[str],
    proxies: Collection[int] = (),
) -> Padding | Reason | None:
    """How the ladder is used, or why not; ``None`` without a ladder.

    ``values`` are the inputs by ordinal; ``verdicts`` and ``conditions`` are those of the graph, in the plan's names.
    ``proxies`` are the inputs from a pipeline stage: their rows are the tokens, unless the options name others.
    """
    if options.ladder is None:
        return None
    meant = _of_tokens(options.token_dim, values, verdicts)
    if options.token_dim is None and proxies:
        meant = [v for v in meant if any(ordinal in proxies and dim == 0 for ordinal, dim in v.inputs)]
    if not meant:
        return Reason("no_token_dim", _no_token_dim(options.token_dim, values, verdicts))
    if len(meant) > 1:
        return Reason("ambiguous_tokens", _ambiguous(values, meant))
    (verdict,) = meant
    ordinal, dim = verdict.inputs[0]
    symbol = values[ordinal].specs[0].shape[dim]
    conditions = tuple(conditions)
    tied = next((c for c in conditions if c.startswith("Eq(") and {symbol} < symbols_in(c)), None)
    if tied is not None:
        return Reason("tied_sizes", f"another size of the inputs follows the number of tokens: {tied}")
    held = next((v for v in values.values() if v.kind in ("static", "constant") and has_rows(v.specs, symbol)), None)
    if held is not None:
        return Reason("held_rows", f"{held.name} is not given by the caller, and has as many rows")
    if verdict.kind == "mixing" and not options.assume_rows_independent:
        where = (f": {verdict.op}" if verdict.op else "") + (f" in {verdict.module}" if verdict.module else "")
        return Reason("mixing_rows", f"padding may reach live rows: {verdict.text}{where}")
    conditions = tuple(text for text in conditions if symbol in symbols_in(text))
    # Fewer rows are another graph: Dynamo makes 0 and 1 constants.
    ranges = [int(text.removeprefix(f"{symbol} >= ")) for text in conditions if _LEAST.fullmatch(text)]
    return Padding(
        symbol=symbol,
        place=(ordinal, dim),
        proof="assumed" if verdict.kind == "mixing" else verdict.kind,
        least=max(verdict.least, *ranges, 0),
        buckets=buckets_of(options),
        specialized=tuple(sorted(set(options.specialized_buckets))),
        conditions=(*conditions, *verdict.bounds),
    )


#: The least that the range of a symbol holds.
_LEAST = re.compile(r"\w+ >= \d+")


def has_rows(specs: Iterable[TensorSpec], symbol: str) -> bool:
    """Whether a size of these tensors depends on the symbol."""
    return any(symbol in symbols_in(size) for spec in specs for size in spec.shape)


def _of_tokens(
    wanted: int | str | None, values: Mapping[int, Value], verdicts: Sequence[RowVerdict]
) -> Sequence[RowVerdict]:
    """The verdicts on the sizes that the options may mean."""
    if isinstance(wanted, str):
        name, _, number = wanted.rpartition(":")
        verdicts = [v for v in verdicts if any(_is_meant(values[o], d, name, int(number)) for o, d in v.inputs)]
    elif wanted is not None:
        verdicts = [v for v in verdicts if any(_is_dim(values[o], d, wanted) for o, d in v.inputs)]
    return verdicts


def _ambiguous(values: Mapping[int, Value], verdicts: Sequence[RowVerdict]) -> str:
    first, _ = verdicts[0].inputs[0]
    name = values[first].argument or values[first].name
    return (
        f"the ladder could be for several sizes that the graph leaves open: {_listed(values, verdicts)}. Say which is "
        f"the number of tokens (options={{'token_dim': '{name}:DIMENSION'}}), or make the others static "
        f"(torch._dynamo.mark_static)"
    )


def _listed(values: Mapping[int, Value], verdicts: Sequence[RowVerdict]) -> str:
    places = [place for verdict in verdicts for place in verdict.inputs]
    return ", ".join(f"dimension {dim} of {label(values[ordinal])}" for ordinal, dim in places)


def _is_meant(value: Value, dim: int, name: str, wanted: int) -> bool:
    return name in (value.name, value.argument) and _is_dim(value, dim, wanted)


def _is_dim(value: Value, dim: int, wanted: int) -> bool:
    rank = len(value.specs[0].shape)
    return -rank <= wanted < rank and dim == wanted % rank


def _no_token_dim(wanted: int | str | None, values: Mapping[int, Value], verdicts: Sequence[RowVerdict]) -> str:
    if verdicts:
        return (
            f"token_dim={wanted!r} names none of the sizes that the graph leaves open: {_listed(values, verdicts)}. "
            f"Name an input of the graph, and a dimension that it has"
        )
    return (
        "no size of an input is open in this graph, which is for one length only; compile with dynamic=True, or mark "
        "the dimension: torch._dynamo.mark_dynamic(input_ids, 1). One row, or none, is a graph of its own also then"
    )


def token_place(options: Options, plan: Plan) -> tuple[int, int] | None:
    """(ordinal, dimension) of an input whose size is the number of tokens, where a ladder is used or could not be;
    ``None`` without a ladder, and where nothing says which it is.
    """
    if plan.padding is not None or options.ladder is None:
        return plan.padding.place if plan.padding is not None else None
    inputs = {value.ordinal: value for value in plan.values if value.ordinal in plan.inputs}
    meant = _of_tokens(options.token_dim, inputs, plan.rows)
    return meant[0].inputs[0] if len(meant) == 1 else None


def slot_policy(options: Options, value: Value, padding: Padding | None, proxies: Collection[int] = ()) -> SlotPolicy:
    """The policy of one slot. Raises ``OptionError`` for one that its input cannot have."""
    policy = options.slots.get(value.name) or options.slots.get(value.argument) or SlotPolicy()
    if value.ordinal in proxies and policy.kind != "zero":
        raise OptionError(
            f"Option 'slots' gives {str(policy)!r} for {label(value)}, which the pipeline stage before hands on: its "
            f"padded rows are zeroed at each call, as nothing is known of what else they could be. Drop it."
        )
    if padding is None or policy.kind == "zero":
        return SlotPolicy()
    rows = has_rows(value.specs, padding.symbol)
    if policy.kind == "once" and rows:
        raise OptionError(
            f"Option 'slots' gives 'once' for {label(value)}, which has other rows at each call. 'once' is for inputs "
            f"that hold the same values at each call."
        )
    if policy.kind == "once" and any(map(symbols_in, (*value.specs[0].shape, *value.specs[0].strides))):
        raise OptionError(
            f"Option 'slots' gives 'once' for {label(value)}, which is of other sizes from call to call. 'once' is for "
            f"inputs that hold the same values at each call."
        )
    if policy.kind != "once" and not rows:
        raise OptionError(
            f"Option 'slots' gives {str(policy)!r} for {label(value)}, which has no padded rows. Drop it."
        )
    if policy.kind == "sentinel":
        _check_sentinel(policy.value, value, padding)
    return policy


def _check_sentinel(number: float, value: Value, padding: Padding) -> None:
    dtype = getattr(torch, value.specs[0].dtype)
    try:
        held = torch.zeros(1, dtype=dtype).fill_(number).item()
    except (OverflowError, RuntimeError, TypeError, ValueError):
        held = None
    exact = dtype.is_floating_point or dtype.is_complex
    if held is None or (not exact and held != number) or (exact and math.isfinite(number) and not cmath.isfinite(held)):
        raise OptionError(
            f"Option 'slots' gives {number!r} for {label(value)}, which a tensor of {value.specs[0].dtype} cannot hold."
        )
    if padding.proof == "causal" and not math.isfinite(number):
        raise OptionError(
            f"Option 'slots' gives {number!r} for {label(value)}, and padded rows of this graph are safe only while "
            f"they are finite (causal). Give a finite number."
        )


def check_rules(options: Options, plan: Plan) -> tuple[BrokenRule, ...]:
    """The rules of configuration that have no bad effect but are broken. Raises ``OptionError`` for those that have."""
    values = plan.by_ordinal
    symbol = plan.padding.symbol if plan.padding is not None else ""
    padded = [slot for slot in plan.slots if symbol and has_rows(values[slot.ordinal].specs, symbol)]
    broken = evaluate_rules(
        Configuration(
            capture=options.capture,
            has_ladder=options.ladder is not None,
            assume_rows_independent=options.assume_rows_independent,
            padding=plan.padding.proof if plan.padding is not None else "",
            slot_policies=tuple(
                (label(values[slot.ordinal]), slot.policy.kind.upper(), values[slot.ordinal].specs[0].dtype)
                for slot in padded
            ),
            hoisted=tuple(dict.fromkeys(hoisted.name for hoisted in plan.hoisted)),
            max_requests=options.limits.max_requests,
        )
    )
    errors = [rule for rule in broken if rule.severity == "error"]
    if errors:
        raise OptionError(" ".join(map(str, errors)))
    return broken


def symbol_sources(plan: Plan, tensors_only: bool = False) -> dict[str, tuple[int, int | None]]:
    """Where to read each open size at a call: (position among the arguments, dimension), or ``None`` for a size that is
    an argument itself. Dimensions count on behind the shape: those are strides.
    """
    values = plan.by_ordinal
    found: dict[str, tuple[int, int | None]] = {}
    for position, ordinal in enumerate(plan.inputs):
        value = values[ordinal]
        if value.kind == "size" and not tensors_only and value.size.isidentifier():
            found.setdefault(value.size, (position, None))
        for spec in value.specs:
            for dim, size in enumerate((*spec.shape, *spec.strides)):
                if size.isidentifier():
                    found.setdefault(size, (position, dim))
    return found


def label(value: Value) -> str:
    """An input for people: its name on the plan and what the user calls it."""
    return f"{value.name} ({value.argument})" if value.argument else value.name


def buckets_of(options: Options) -> tuple[int, ...]:
    """The buckets of the ladder, as they are used; none without one."""
    return () if options.ladder is None else tuple(options.ladder.multiple_of(options.bucket_multiple))


def check_specialized(options: Options) -> None:
    """Raise ``OptionError`` for a specialised bucket that the ladder does not have."""
    if not options.specialized_buckets:
        return
    buckets = buckets_of(options)
    if not buckets:
        raise OptionError(
            "Option 'specialized_buckets' names buckets of a ladder, and there is none. Give options={'ladder': ...}."
        )
    for rows in options.specialized_buckets:
        if rows not in buckets:
            at = bisect_left(buckets, rows)
            near = (*buckets[max(at - 1, 0) : at], *buckets[at : at + 1])
            raise OptionError(
                f"Option 'specialized_buckets' names {rows}, which is no bucket of the ladder. The nearest: "
                f"{' and '.join(map(str, near))}."
            )


def check_slot_names(options: Options, values: Iterable[Value]) -> None:
    """Raise ``OptionError`` for a policy of an input that the graph does not have."""
    known = {name for value in values if value.kind == "input" for name in (value.name, value.argument) if name}
    for name in options.slots:
        if name not in known:
            raise OptionError(f"Option 'slots' names {name!r}, which is no input of this graph. {nearest(name, known)}")
