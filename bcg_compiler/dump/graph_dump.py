"""What is kept of one graph: what passes did to it, its plans, and all code that is generated for it."""

import difflib
import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from bcg_compiler.compat import structured_trace
from bcg_compiler.compat.dynamo import running_name
from bcg_compiler.compat.inductor import file_of
from bcg_compiler.dump.dot import plan_dot
from bcg_compiler.dump.folder import HEADER, Folder, LeftOut, folder_of, log
from bcg_compiler.dump.graph_text import graph_text
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.lower import Texts
from bcg_compiler.options import Options
from bcg_compiler.passes import PassResult
from bcg_compiler.plan import Plan, plan_text, plan_to_json

#: The environment variable that stands for the option ``dump`` where that is not given.
VARIABLE = "BCG_DUMP"

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _harmless(
    method: "Callable[Concatenate[GraphDump, _P], _R]",
) -> "Callable[Concatenate[GraphDump, _P], _R | None]":
    """Nothing where there is no dump; an error ends the dump, and not the program."""

    @functools.wraps(method)
    def run(self: "GraphDump", *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        if not self.wanted:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.fail(error)
            return None

    return run


class GraphDump:
    """Keeps texts of one graph in a folder of its own, in torch's structured trace, in both, or nowhere.

    To be made while Dynamo calls the backend. None of its methods raises.
    """

    def __init__(self, options: Options) -> None:
        directory = os.environ.get(VARIABLE, "") if options.dump is None else options.dump
        self._folder = _folder(directory)
        self._traced = structured_trace.is_traced()
        self._name = ""
        self._place = ""  # of what is written now, below the folder of the graph
        self._plans = 0
        self._passes = 0
        self._last = ("", "")  # name and text of the graph as it was last written
        self._said: list[str] = []  # for the trace
        self._kept: dict[str, tuple[int, str]] = {}  # by name: a hash of the text, and the file
        self._begin(options)

    @property
    def wanted(self) -> bool:
        """Whether anything is to be kept."""
        return self._traced or (self._folder is not None and self._folder.usable)

    @property
    def texts(self) -> Texts | None:
        """What keeps generated code; ``None`` where nothing is."""
        return self if self.wanted else None

    def fail(self, error: Exception) -> None:
        """Keep nothing more of this graph."""
        if self._folder is not None:
            self._folder.fail(error)
        else:
            log.warning("bcg: nothing more of a graph is traced: %s: %s", type(error).__name__, error)
        self._traced = False

    @_harmless
    def _begin(self, options: Options) -> None:
        self._compiled = structured_trace.current_compile()
        self._name = running_name() or "graph"
        if self._folder is not None:
            self._name = self._folder.begin(self._name) or ""
            if not self._name:
                self._folder = None
        self._say(f"{HEADER} {self._name}, torch {torch.__version__}")
        given = [f"{field.name}={_shown(getattr(options, field.name))}" for field in _given(options)]
        self._say(f"options: {', '.join(given) or 'the defaults'}")

    @_harmless
    def unsplit(self, why: str, code: str) -> None:
        """The graph runs as it is, and why."""
        self._put("graph.txt", code, f"the graph, which runs as it is, without segments and breaks: {why}")

    @_harmless
    def traced(self, graph: AnnotatedGraph) -> None:
        """The graph as Dynamo gave it, before any pass."""
        self._say("\npasses, in their order: how much each changed, and the texts before and behind it")
        text = graph_text(graph)
        self._put("passes/00_dynamo.txt", text, "the graph as Dynamo gave it")
        self._last = "passes/00_dynamo.txt", text

    @_harmless
    def passed(self, graph: AnnotatedGraph, result: PassResult) -> None:
        """A pass has run. If it changed anything, so does the text."""
        self._passes += 1
        changed = f"{result.name}: {result.changes} change{'s' * (result.changes != 1)}"
        self._say(f"  {changed}")
        for note in result.notes:
            self._say(f"      {note}")
        if result.changes:
            name, text = f"passes/{self._passes:02d}_{result.name}", graph_text(graph)
            self._put(f"{name}.txt", text, "the graph behind it")
            self._put_diff(name, text)

    @_harmless
    def planned(self, graph: AnnotatedGraph, plan: Plan) -> None:
        """A plan was made of the marked graph: at first, and again when a capture or a ladder has changed it."""
        self._place = f"again_{self._plans}/" if self._plans else ""
        self._plans += 1
        text = plan_text(plan)
        self._say(f"\n{self._place}{text.partition(chr(10))[0]}")
        if self._place:
            self._say("  what lies in this folder runs from here on, in place of what is above")
        for word, reason in (("not captured", plan.uncaptured), ("not padded", plan.unpadded)):
            if reason is not None:
                self._say(f"  {word}: {reason.code}: {reason.text}")
        for rule in plan.broken_rules:
            self._say(f"  {rule.severity}: {rule.code}: {rule}")
        if self._place:
            plain = graph_text(graph)
            self._put_diff("graph", plain)
        self._put("graph.txt", graph_text(graph, with_facts=True), "the graph, with the plan's ordinals and all facts")
        if self._traced:
            self._trace("bcg_index", "\n".join(self._said) + "\n")
            self._said.clear()
        self._put("plan.txt", text, "the plan, as on every machine")
        self._put("plan.json", plan_to_json(plan), "the plan with everything in it")
        self._put("plan.dot", plan_dot(plan), "the plan to draw: dot -Tsvg plan.dot > plan.svg")

    @_harmless
    def file(self, name: str, source: str) -> str | None:
        """Keep generated code: see ``bcg_compiler.lower.Texts``."""
        number, base = 1, name
        while (known := self._kept.get(f"{self._place}{name}")) is not None:
            if known[0] == hash(source):
                return known[1] or None
            number += 1
            name = f"{base}_{number}"
        file = self._put(f"{name}.py", source, _about(base))
        self._kept[f"{self._place}{name}"] = hash(source), file or ""
        return file

    @_harmless
    def compiled(self, name: str, code: str) -> None:
        """Say where the code of a compiler lies: see ``bcg_compiler.lower.Texts``."""
        self._say(f"      {name}.py is compiled to {file_of(code)}: breakpoints there stop what runs")

    def _put_diff(self, name: str, text: str) -> None:
        """Keep what differs in a graph from the text that was kept last."""
        (before, old), self._last = self._last, (f"{self._place}{name}.txt", text)
        lines = difflib.unified_diff(old.splitlines(), text.splitlines(), before, self._last[0], n=2, lineterm="")
        self._put(f"{name}.diff", "\n".join(lines) + "\n", f"what differs from {before}")

    def _put(self, name: str, text: str, what: str) -> str | None:
        """Keep a text; the full name of its file, if it has one."""
        name = f"{self._place}{name}"
        if self._traced:
            stem, _, kind = name.rpartition(".")
            label = "bcg_" + (stem if kind in ("txt", "json") else name).replace("/", "_").replace(".", "_")
            self._trace(label, text, "json" if kind == "json" else "string")
        if self._folder is None or not self._folder.usable:
            return None
        try:
            path = self._folder.write(f"{self._name}/{name}", text)
        except LeftOut as left_out:
            if str(left_out):
                self._say(f"  {name:<36} {left_out}")
            return None
        self._say(f"  {name:<36} {what}")
        return str(path)

    def _trace(self, name: str, text: str, encoding: str = "string") -> None:
        structured_trace.trace_artifact(name, encoding, text, self._compiled)

    def _say(self, text: str) -> None:
        if self._traced:
            self._said.append(text)
        if self._folder is not None and self._folder.usable:
            self._folder.say(self._name, text)


def _folder(directory: str) -> Folder | None:
    try:
        return folder_of(directory) if directory else None
    except OSError as error:  # a relative name, and the current folder is gone
        log.warning("bcg: there is no dump to %s: %s: %s", directory, type(error).__name__, error)
        return None


def _about(name: str) -> str:
    """What a file of generated code is."""
    kind, *sizes = name.split("_")
    pairs = ", ".join(f"{symbol} = {size}" for symbol, size in zip(sizes[::2], sizes[1::2], strict=False))
    where = f" where {pairs}" if pairs else ""
    if kind.startswith("units/"):
        return "a unit: what a compiler is given, and what runs without its code"
    return {
        "program": f"code that runs{where}: segments, which captures record, and all steps eagerly",
        "stubs": f"what a capture{where} does in place of break functions",
        "replay": f"what a call runs that replays{where}",
    }.get(kind, "generated code")


def _given(options: Options) -> Iterable[Any]:
    """The options that are not as they are by default, but for the folder of the dump."""
    default = Options()
    return [f for f in fields(options) if f.name != "dump" and getattr(options, f.name) != getattr(default, f.name)]


def _shown(value: Any) -> str:
    """A value as text that is the same in every process."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return str(getattr(value, "__qualname__", "a function")) if callable(value) else repr(value)
