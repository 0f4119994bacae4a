"""The plan as stable text, its hash, and JSON.

The text holds module paths, parameter names, op names and ordinals. It holds no local variable, no path of a file, no
address and nothing that depends on the device, so that it is the same on every machine for one version of torch and of
the model's code. Source lines are for ``explain`` only.
"""

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from bcg_compiler.plan.plan import Plan, Step, Value


def plan_text(plan: Plan) -> str:
    """The whole plan as text, with its hash in the first line."""
    lines = [
        f"plan {plan_hash(plan)}: {_count(plan.segments, 'segment')} ({plan.unique_units} different), "
        f"{_count(plan.breaks, 'break')}"
    ]
    told = [p for p in plan.passes if p.changes or p.notes]
    lines += [f"pass {p.name}: {p.changes}" + "".join(f"; {note}" for note in p.notes) for p in told]
    return "\n".join(lines + _body(plan)) + "\n"


def plan_hash(plan: Plan) -> str:
    """What ranks compare: equal for plans with the same inputs, steps and values, whatever passes led there."""
    return hashlib.sha256("\n".join(_body(plan)).encode()).hexdigest()[:16]


def plan_to_json(plan: Plan) -> str:
    """The plan with everything in it, source lines included."""
    return json.dumps(dataclasses.asdict(plan), indent=1)


def plan_from_json(text: str) -> Plan:
    """The plan that ``plan_to_json`` wrote."""
    return typing.cast(Plan, _read(Plan, json.loads(text)))


def _body(plan: Plan) -> list[str]:
    values = plan.by_ordinal
    lines = []
    for ordinal in plan.inputs:
        value = values[ordinal]
        lines.append(f"given {value.name} {value.kind} {_specs(value, plan.device)}".rstrip())
    for slot in plan.slots:
        marks = " written" * slot.written + " moving" * slot.moving + f" {slot.policy}" * (slot.policy.kind != "zero")
        lines.append(f"slot {values[slot.ordinal].name}{marks}")
    if plan.padding is not None:
        lines.append(f"pad {plan.padding.symbol} {plan.padding.proof} to {', '.join(map(str, plan.padding.buckets))}")
        if plan.padding.specialized:
            lines.append(f"specialize {', '.join(map(str, plan.padding.specialized))}")
    for hoisted in plan.hoisted:
        lines.append(f"first {hoisted.name}({hoisted.constants}) for {_count(hoisted.nodes, 'op')}")
        lines += [f"  %{n.ordinal} {n.op}" + f" in {n.module}" * bool(n.module) for n in hoisted.nodes]
    lines += [f"reserve {reserve.name} {reserve.bytes} bytes" for reserve in plan.reserves]
    for step in plan.steps:
        lines += _step(step, values, frozenset(plan.bridges), plan.device)
    lines.append("return " + ", ".join(values[o].name for o in plan.outputs))
    return lines


def _step(step: Step, values: Mapping[int, Value], bridges: frozenset[int], device: str) -> list[str]:
    unit = f" unit {step.unit}" if step.unit else ""
    lines = [f"step {step.index} {step.kind}{unit}: {_count(step.nodes, 'op')}, {step.kernels} kernels"]
    if step.inputs:
        lines.append("  reads " + ", ".join(values[o].name for o in step.inputs))
    for module, nodes in groupby(step.nodes, key=lambda node: node.module):
        lines.append(f"  {module or '.'}: " + " ".join(_run_lengths(n.op for n in nodes)))
    for reason in step.reasons:
        if reason.code == "capturable":
            continue  # the word segment says it
        where = f" in {reason.module}" if reason.module else ""
        lines.append(f"  {reason.code}: %{reason.ordinal} {reason.op}{where}: {reason.text}")
    for ordinal in step.outputs:
        bridge = " bridge" if ordinal in bridges else ""
        lines.append(f"  gives {values[ordinal].name} {_specs(values[ordinal], device)}".rstrip() + bridge)
    for node, value in step.tails:
        lines.append(f"  clears the padded rows of {values[value].name} behind %{node}")
    if step.frees:
        lines.append("  frees " + ", ".join(values[o].name for o in step.frees))
    return lines


def _specs(value: Value, device: str) -> str:
    return ", ".join(f"{spec}" + ("" if spec.device == device else f" on {spec.device}") for spec in value.specs)


def _run_lengths(ops: Iterable[str]) -> list[str]:
    counted = ((op, len(list(run))) for op, run in groupby(ops))
    return [op if count == 1 else f"{op}*{count}" for op, count in counted]


def _count(things: tuple[Any, ...], name: str) -> str:
    return f"{len(things)} {name}" + ("" if len(things) == 1 else "s")


def _read(kind: Any, data: Any) -> Any:
    """Rebuild nested dataclasses and tuples from what JSON made of them."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _read(hints[name], value) for name, value in data.items()})
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(_read(args[0], item) for item in data)
    if origin in (types.UnionType, typing.Union):
        inner = next(a for a in args if a is not type(None))
        return None if data is None else _read(inner, data)
    return data
