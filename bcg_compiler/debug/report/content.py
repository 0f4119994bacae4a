"""Plans → what the page shows, as data that JSON can hold.

Texts that come again and again (operations, modules, lines of code, sizes) are in tables, and steps hold their numbers:
61 layers have ten thousand operations. The script of the page reads the same lists by position.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from bcg_compiler.breaks import KINDS
from bcg_compiler.compat.dynamo_log import CodePlace, Uncompiled
from bcg_compiler.debug import memory, screen
from bcg_compiler.debug.explain import Explanation
from bcg_compiler.debug.hoisted import about_hoisted
from bcg_compiler.debug.padded import about_padding
from bcg_compiler.debug.reasons import UNPADDED, meaning, remedies
from bcg_compiler.debug.report import layers
from bcg_compiler.debug.report.changes import PassDiff, changed_lines
from bcg_compiler.debug.steps import StepTime
from bcg_compiler.debug.words import common_text, count, short_path
from bcg_compiler.facts.node import Source
from bcg_compiler.plan import Plan, Step, StepReason, Value
from bcg_compiler.plan.memory import Forecast, Symbols

#: Breaks that somebody asked for; all others were found.
DECLARED = (*KINDS, "user_rule")


@dataclass(frozen=True)
class Report:
    """What a page is about.

    ``label``      of the model; ``about`` further lines on it, by their names
    ``plans``      one for each graph; ``None`` for one that runs unsplit
    ``uncompiled`` what Dynamo left outside of the graphs; ``note`` how the plans were made, if it was not the usual way
    ``length``     tokens of the prompt; bytes of graphs without buckets are told for it
    ``lengths``    prompts to count the padding of
    ``times``      measured parts of a replay, by the position of the graph
    ``passes``     what passes changed, by the position of the graph
    """

    label: str
    plans: Sequence[Plan | None]
    uncompiled: Uncompiled = field(default_factory=Uncompiled)
    about: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    length: int | None = None
    lengths: Sequence[int] = ()
    times: Mapping[int, Sequence[StepTime]] = field(default_factory=dict)
    passes: Mapping[int, Sequence[PassDiff]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        found: Explanation,
        about: Mapping[str, str],
        length: int,
        lengths: Sequence[int],
        passes: Mapping[int, Sequence[PassDiff]] | None = None,
    ) -> "Report":
        """The report of what ``plan_model`` found for a prompt of ``length`` tokens."""
        label, _, architecture = found.label.partition(": ")
        return cls(
            label=label,
            plans=found.plans,
            uncompiled=found.uncompiled,
            about={"": architecture, **about} if architecture else about,
            note=found.note,
            length=length,
            lengths=lengths,
            passes=passes or {},
        )


class _Table:
    """Numbers things in the order they are first met."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __call__(self, thing: Hashable) -> int:
        return self.numbers.setdefault(thing, len(self.numbers))


def content(report: Report) -> dict[str, Any]:
    """All data of the page."""
    ops, modules, sources = _Table(), _Table(), _Table()
    plans = [plan for plan in report.plans if plan is not None]
    graphs = [
        _Graph(plan, report, number, ops, modules, sources).data() if plan is not None else None
        for number, plan in enumerate(report.plans)
    ]
    codes = {reason.code for plan in plans for step in plan.steps for reason in step.reasons}
    return {
        "label": report.label,
        "about": dict(report.about),
        "note": report.note,
        "graphs": graphs,
        "declared": DECLARED,
        "meanings": {code: list(meaning(code)) for code in sorted(codes)},
        "uncompiled": list(_uncompiled(report.uncompiled)),
        "ops": list(ops.numbers),
        "modules": list(modules.numbers),
        "sources": [[short_path(s.file), s.line, s.code] if s else None for s in sources.numbers],
    }


class _Graph:
    def __init__(self, plan: Plan, report: Report, number: int, ops: _Table, modules: _Table, sources: _Table) -> None:
        self.plan, self.report, self.number = plan, report, number
        self.ops, self.modules, self.sources = ops, modules, sources
        self.sizes: Symbols = memory.sizes_of(plan, report.length)
        self.units, self.parts, self.looks, self.texts = _Table(), _Table(), _Table(), _Table()
        self.times = {t.index: t for t in report.times.get(number, ()) if t.kind in ("segment", "break")}

    def data(self) -> dict[str, Any]:
        """What is shown of the graph."""
        plan = self.plan
        steps = [self._step(step) for step in plan.steps]
        rows = layers.rows_of(plan)
        looks = [step["look"] for step in steps]
        blocks = screen.fold([layers.look(row, looks) for row in rows])
        shown = sorted({o for step in plan.steps for o in (*step.inputs, *step.outputs)} | {*plan.inputs})
        return {
            "summary": screen.plan_summary(plan),
            "inputs": screen.plan_inputs(plan),
            "notes": [*about_hoisted(plan), *about_padding(plan)],
            "sizes": dict(self.sizes),
            "counts": self._counts(),
            "steps": steps,
            "rows": [[r.label, [[p.step, p.ops, p.kernels, p.begins, p.ends] for p in r.pieces]] for r in rows],
            "blocks": [[*block, *self._labels(rows, block)] for block in blocks],
            "values": {o: self._value(plan.value(o)) for o in shown},
            "given": list(plan.inputs),
            "breaks": list(self._breaks()),
            "buckets": [
                [use.rows, _bytes(use.forecast), use.prompts, use.live, use.padded]
                for use in memory.buckets_of(plan, self.report.lengths)
            ],
            "above": sum(length > plan.padding.buckets[-1] for length in self.report.lengths) if plan.padding else 0,
            "forecast": _bytes(memory.forecast_of(plan, *([self.report.length] if self.report.length else []))),
            "unpadded": self._unpadded(),
            "passes": list(self._passes()),
            "other_times": self._other_times(),
            "units": list(self.units.numbers),
            "parts": list(self.parts.numbers),
            "texts": [[text, memory.size_in_bytes(text, self.sizes)] for text in self.texts.numbers],
        }

    def _counts(self) -> dict[str, int]:
        plan = self.plan
        return {
            "segments": len(plan.segments),
            "breaks": len(plan.breaks),
            "kernels": sum(step.kernels for step in plan.steps),
            "inside": sum(step.kernels for step in plan.segments),
        }

    def _labels(self, rows: Sequence[layers.Row], block: screen.Block) -> list[list[str]]:
        end = block.start + block.period * block.repeats
        return [[layers.label_of(rows[block.start + i : end : block.period]) for i in range(block.period)]]

    def _step(self, step: Step) -> dict[str, Any]:
        codes = list(dict.fromkeys(reason.code for reason in step.reasons))
        data = {
            "break": step.kind == "break",
            "span": screen.span(step),
            "label": screen.ops_of(step) if step.kind == "break" else "",
            "codes": codes,
            "kernels": step.kernels,
            "unit": self.units(step.unit) if step.unit else -1,
            "look": self.looks(screen.step_key(step)),
            "nodes": [
                [self.ops(n.op), self.modules(n.module), self.sources(n.source), n.kernels, n.ordinal]
                for n in step.nodes
            ],
            "reasons": [self._reason(reason) for reason in step.reasons],
            "inputs": step.inputs,
            "outputs": step.outputs,
            "parts": [[self.parts(unit.key), len(unit.nodes)] for unit in step.units],
            "fixed": len(step.fixed),
            "tails": [[node, self._named(value)] for node, value in step.tails],
            "peak": memory.peak(step, self.sizes),
            "allocations": [
                [self.texts(a.bytes), a.born, -1 if a.dies is None else a.dies, -1 if a.freed is None else a.freed]
                for a in step.allocations
            ],
        }
        if (time := self.times.get(step.index)) is not None:
            data["time"] = [time.host_us, time.device_us]
        return data

    def _reason(self, reason: StepReason) -> list[Any]:
        op, module, source = self.ops(reason.op), self.modules(reason.module), self.sources(reason.source)
        return [reason.code, reason.text, op, module, source, *remedies([reason])]

    def _named(self, ordinal: int) -> str:
        value = self.plan.by_ordinal.get(ordinal)
        return value.name if value else f"%{ordinal}"

    def _value(self, value: Value) -> list[Any]:
        """Name, what the user calls it, kind, what it is in memory, specs as text, bytes."""
        device = self.plan.device
        specs = ", ".join(f"{s}" + ("" if s.device == device else f" on {s.device}") for s in value.specs)
        return [
            value.name,
            value.argument,
            value.kind,
            self._role(value.ordinal),
            specs or value.size,
            memory.value_bytes(value, self.sizes) if value.specs else 0,
        ]

    def _role(self, ordinal: int) -> str:
        slot = next((slot for slot in self.plan.slots if slot.ordinal == ordinal), None)
        if slot is not None:
            marks = [mark for mark, is_so in (("written", slot.written), ("moving", slot.moving)) if is_so]
            return ", ".join(["slot", *marks, *([f"padded rows: {slot.policy}"] * (self.plan.padding is not None))])
        return "bridge" if ordinal in self.plan.bridges else "returned" if ordinal in self.plan.outputs else ""

    def _breaks(self) -> Iterator[dict[str, Any]]:
        """The reasons by code; of each sentence the lines it is about, with modules and steps."""
        found = sorted(((r, step) for step in self.plan.breaks for r in step.reasons), key=lambda pair: pair[0].code)
        for code, group in groupby(found, key=lambda pair: pair[0].code):
            pairs = list(group)
            alone = {step.index for _, step in pairs if {r.code for r in step.reasons} <= {code, "small_segment"}}
            texts: dict[str, dict[Source | None, list[tuple[StepReason, Step]]]] = {}
            for reason, step in pairs:
                texts.setdefault(reason.text, {}).setdefault(reason.source, []).append((reason, step))
            yield {
                "code": code,
                "times": len(pairs),
                "steps": len({step.index for _, step in pairs}),
                "alone": len(alone),
                "remedies": remedies(reason for reason, _ in pairs),
                "texts": [
                    [
                        text,
                        [
                            [
                                self.sources(source),
                                common_text(list(dict.fromkeys(r.module for r, _ in at))) or "the model itself",
                                sorted({step.index for _, step in at}),
                            ]
                            for source, at in places.items()
                        ],
                    ]
                    for text, places in texts.items()
                ],
            }

    def _unpadded(self) -> dict[str, Any] | None:
        reason = self.plan.unpadded
        if reason is None:
            return None
        mixing = (rows for rows in self.plan.rows if rows.kind == "mixing" and rows.text in reason.text)
        places = [self.sources(rows.source) for rows in mixing if rows.source is not None]
        return {"code": reason.code, "text": reason.text, "sources": places, "meaning": list(UNPADDED[reason.code])}

    def _passes(self) -> Iterator[dict[str, Any]]:
        diffs = {diff.name: diff for diff in self.report.passes.get(self.number, ())}
        for found in self.plan.passes:
            diff = diffs.get(found.name)
            lines = changed_lines(diff.before, diff.after) if diff else []
            yield {
                "name": found.name,
                "changes": found.changes,
                "notes": list(screen.folded(found.notes)),
                "diff": lines,
            }

    def _other_times(self) -> dict[str, list[float | None]]:
        """What fills of slots and bridges, and copies back take together: host and device."""
        found: dict[str, list[float | None]] = {}
        for time in self.report.times.get(self.number, ()):
            if time.kind not in ("segment", "break"):
                total = found.setdefault(time.kind, [0.0, None])
                total[0] = (total[0] or 0.0) + time.host_us
                if time.device_us is not None:
                    total[1] = (total[1] or 0.0) + time.device_us
        return found


def _bytes(found: Forecast | None) -> list[int] | None:
    return None if found is None else [found.slots, found.bridges, found.segments, found.reserves]


def _uncompiled(found: Uncompiled) -> Iterator[list[Any]]:
    """What Dynamo left to plain Python: a sentence, and the places it is about."""
    for cut in found.graph_breaks:
        yield [f"Dynamo cut the graph, {count(cut.count, 'time')}: {cut.reason}", _places(cut.places)]
    if found.skipped:
        yield ["Functions that it could not cut: they run uncompiled as a whole", _places(found.skipped)]
    if found.limit_hits:
        yield ["Functions that hit its recompile limit, and then ran uncompiled", _places(found.given_up)]


def _places(places: Iterable[CodePlace]) -> list[str]:
    return [f"{short_path(p.file)}:{p.line} {p.name}".rstrip() + f": {p.detail}" * bool(p.detail) for p in places]
