"""Checks for all captures of the programs that are made while they are in place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from bcg_compiler.checks.breaks import checked_break
from bcg_compiler.checks.fault import Fault
from bcg_compiler.checks.numbers import close
from bcg_compiler.checks.segments import SegmentCheck, undrawn
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.facts.node import WORLD
from bcg_compiler.lower import Code, UnitCompiler
from bcg_compiler.plan import Plan, Step
from bcg_compiler.runtime import memory
from bcg_compiler.runtime.buckets import Bucket
from bcg_compiler.runtime.capture import CaptureDevice, EmulatedCapture, Replay

#: Told at each replay: the graph, the step that has run, the ordinal of a value that it gives, and the value.
Told = Callable[[AnnotatedGraph, Step, int, Any], None]


class Checks:
    """A ``Watch``: compares segments and breaks with eager operations, and reports each fault.

    ``emulated``  whether to capture on the emulated device whatever the options say
    ``told``      is called with the values between steps
    ``checked``   counts the replays of segments so far; ``first`` is for the first fault
    ``eagerly``   says of a segment whether its operations run in place of its replay, at the exact number of rows
    """

    def __init__(
        self,
        report: Callable[[Fault], None],
        *,
        emulated: bool = False,
        told: Told = lambda graph, step, ordinal, value: None,
        eagerly: Callable[[Step], bool] = lambda step: False,
    ) -> None:
        self.report = report
        self.told = told
        self.eagerly = eagerly
        self.checked = 0
        self.first: Fault | None = None
        self._emulated = emulated

    def device(self, device: torch.device, wanted: str) -> CaptureDevice | None:
        """The strict emulated device, unless it is to be CUDA's."""
        emulated = self._emulated or wanted == "emulated" or (wanted == "auto" and device.type != "cuda")
        return EmulatedCapture(device, strict=True) if emulated else None

    def capture(
        self,
        graph: AnnotatedGraph,
        plan: Plan,
        compiler: UnitCompiler | None,
        bucket: Bucket | None,
        add: Callable[[Code], None],
    ) -> "CaptureChecks":
        """The checks of one capture."""
        return CaptureChecks(self, graph, plan, compiler, bucket, add)


class CaptureChecks:
    """A ``CaptureWatch``: the checks of one capture."""

    def __init__(
        self,
        checks: Checks,
        graph: AnnotatedGraph,
        plan: Plan,
        compiler: UnitCompiler | None,
        bucket: Bucket | None,
        add: Callable[[Code], None],
    ) -> None:
        self._checks = checks
        self._graph = graph
        self._plan = plan
        self._compiler = compiler
        self._bucket = bucket
        self._add = add
        self._steps = {node.ordinal: step for step in plan.steps for node in step.nodes}
        self._segments: dict[int, SegmentCheck] = {}
        self._suspects: list[Fault] = []

    def segment(self, step: Step, run: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        """The code of a segment with a look at each value, where its units are not compiled."""
        eagerly = self._checks.eagerly(step)
        check = SegmentCheck(self._graph, self._plan, step, self._bucket, self._compiler, self._report, eagerly)
        self._segments[step.index] = check
        self._add(check.code)
        return check.captured(run)

    def replay(self, step: Step, args: tuple[Any, ...], results: tuple[Any, ...], replay: Replay) -> Replay:
        """The replay with its operations beside it."""
        check = self._segments[step.index]

        def checked() -> None:
            __tracebackhide__ = True
            self._checks.checked += 1
            check.replay(args, results, replay)
            for ordinal, value in zip(step.outputs, results, strict=True):
                self._checks.told(self._graph, step, ordinal, value)

        return checked

    def around(self, node: Node, target: Callable[..., Any]) -> Callable[..., Any]:
        """A body that is not seen from outside, with a look at what it writes and gives."""
        facts = self._graph.facts[node]
        if not facts.opaque and WORLD not in facts.writes:
            return target
        return checked_break(self._graph, self._steps[facts.ordinal], node, target, self._checks.report)

    def call(self, run: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
        """All of a replay; where rows of a segment are suspected, eager code runs too: see Note [Padded rows]."""
        if self._bucket is None:
            return run
        written = [self._plan.inputs.index(ordinal) for ordinal in self._plan.written_inputs]

        def checked(*args: Any) -> Any:
            __tracebackhide__ = True
            self._suspects.clear()
            given = [memory.own(arg) if i in written and isinstance(arg, Tensor) else arg for i, arg in enumerate(args)]
            results = run(*args)
            if self._suspects:
                with undrawn(self._plan.device):
                    wanted = eager(*given)
                pairs = zip(tree_leaves((results, args)), tree_leaves((wanted, given)), strict=True)
                if any(isinstance(want, Tensor) and not close(got, want) for got, want in pairs):
                    self._checks.report(self._suspects[0])
            return results

        return checked

    def _report(self, fault: Fault) -> None:
        __tracebackhide__ = True
        if fault.kind == "padding":
            self._suspects.append(fault)
        else:
            self._checks.report(fault)

    def note(self, ordinal: int, value: Any) -> None:
        """A value that a break gives."""
        self._checks.told(self._graph, self._steps[ordinal], ordinal, value)


# Note [Padded rows]
# That a value of a segment has other live rows in a bucket than at the exact length is no fault yet: where tokens are
# sorted by expert, padded ones stand among live ones, and are sorted back later. So it is a suspicion only, until the
# results of the graph, and what it writes, are compared with those of its steps run eagerly at the exact length. Bodies
# of breaks then run twice, but in such calls only.
