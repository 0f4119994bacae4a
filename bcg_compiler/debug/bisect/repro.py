"""A file that shows a difference by itself: the operation alone, what leads to it in its segment, or the whole model.

The smallest of these is kept that has been seen to fail in a process of its own.
"""

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.buckets import Ladder
from bcg_compiler.checks import Fault
from bcg_compiler.compat.ops import defined_in
from bcg_compiler.debug.bisect.calls import Seen
from bcg_compiler.lower.units import unit_graph
from bcg_compiler.plan import CompileUnit

#: Seconds that a reproduction may take.
TIMEOUT = 600

#: How often an operation alone is called: one call warms up, one captures, the others replay.
CALLS = 4

#: What of the options an operation alone is compiled with.
_KEPT = ("capture", "capturable", "segment_compiler", "outputs", "max_padding_factor", "assume_rows_independent")


@dataclass(frozen=True)
class Recipe:
    """How a model is built and called: by its name, what ``zoo.build`` is given, the lengths of the calls."""

    name: str
    build: Mapping[str, Any]
    lengths: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Repro:
    """A file that was written: what it holds, and the last line of what it says when it is run.

    ``path`` is ``None`` where nothing that could be written shows the difference.
    """

    path: Path | None
    holds: str = ""
    says: str = ""


class _NotWritable(Exception):
    """Something has no name that another process could import it by."""


def write_repro(out: Path, fault: Fault | None, seen: Seen, options: Mapping[str, Any], recipe: Recipe | None) -> Repro:
    """Write the smallest file that shows the difference, and run it."""
    for holds, text in _candidates(fault, seen, options, recipe):
        out.write_text(text)
        path = os.pathsep.join([str(Path(inspect.getfile(sys.modules["bcg_compiler"])).parent.parent)])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, str(out)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment)
        said = [line for line in ran.stderr.splitlines() if line.startswith("AssertionError")]
        if ran.returncode and said:
            return Repro(out, holds, said[-1])
    out.unlink(missing_ok=True)
    return Repro(None)


def _candidates(
    fault: Fault | None, seen: Seen, options: Mapping[str, Any], recipe: Recipe | None
) -> Iterator[tuple[str, str]]:
    if fault is not None and fault.graph is not None:
        slices = {"the operation alone": [fault.ordinal], "what leads to the operation": _leading_to(fault)}
        for holds, ordinals in slices.items():
            try:
                yield holds, _operations_text(fault, ordinals, options)
            except _NotWritable:
                continue
    if recipe is not None:
        try:
            yield "the model", _model_text(fault, seen, options, recipe)
        except _NotWritable:
            return


def _leading_to(fault: Fault) -> list[int]:
    """The operations of the segment that the fault's one depends on, itself included, in order."""
    graph = fault.graph
    assert graph is not None
    nodes = {f.ordinal: node for node, f in graph.facts.items()}
    found, todo = set[int](), [nodes[fault.ordinal]]
    while todo:
        node = todo.pop()
        ordinal = graph.known[node].ordinal
        if ordinal in found or node not in graph.facts or (ordinal in fault.given and ordinal != fault.ordinal):
            continue
        found.add(ordinal)
        todo += node.all_input_nodes
    return sorted(found)


# -- operations


def _operations_text(fault: Fault, ordinals: Sequence[int], options: Mapping[str, Any]) -> str:
    graph = fault.graph
    assert graph is not None
    nodes = {f.ordinal: node for node, f in graph.known.items()}
    inner = [nodes[ordinal] for ordinal in ordinals]
    if any(isinstance(node.target, BoundBreak) for node in inner):
        raise _NotWritable
    inputs = tuple(
        dict.fromkeys(graph.known[n].ordinal for node in inner for n in node.all_input_nodes if n not in inner)
    )
    values = {**fault.made, **fault.given}
    if not all(ordinal in values for ordinal in inputs):
        raise _NotWritable
    unit = CompileUnit("", tuple(ordinals), inputs, (ordinals[-1],))
    code = unit_graph(graph, unit, nodes).graph.python_code("self")
    if "self." in code.src:
        raise _NotWritable
    body = code.src.strip().replace("def forward(self, ", "def model(").replace("def forward(self", "def model(")
    imports = _Imports()
    for node in inner:
        imports.of_op(node)
    for name, value in code.globals.items():
        if name != "torch" and re.search(rf"\b{name}\b", body):  # more are given than are used
            imports.add(value, name)
    kept = {name: options[name] for name in _KEPT if name in options} | {"min_segment_kernels": 1}
    live, bucket = fault.rows or (0, 0)
    if fault.rows:
        kept["ladder"] = [bucket]
    given = [_expression(values[ordinal], live) for ordinal in inputs]
    dims = {
        at: [dim for dim, size in enumerate(values[o].shape) if size == live]
        for at, o in enumerate(inputs)
        if fault.rows and isinstance(values[o], Tensor)
    }
    marks = [f"    torch._dynamo.mark_dynamic(given[{at}], {dim})" for at, of in dims.items() for dim in of]
    shown = imports.options(kept)
    rows = [bucket, *(live,) * (CALLS - 1)] if fault.rows else [0] * CALLS
    return "\n".join(
        [
            f'"""{fault.kind}: {fault.place}',
            "",
            f"{fault.what}. Written by bcg bisect: it fails as long as the difference is there.",
            '"""',
            "",
            "import copy",
            "",
            "import torch",
            "",
            *imports.lines,
            "from bcg_compiler.checks import strict",
            "from bcg_compiler.debug.compare import compare",
            "",
            "",
            body,
            "",
            "",
            "def inputs(rows):",
            "    return [",
            *(f"        {expression}," for expression in given),
            "    ]",
            "",
            "",
            f'compiled = torch.compile(model, backend="bcg", options={shown})',
            f"for call, rows in enumerate({rows}):",
            "    torch.manual_seed(call)",
            "    given = inputs(rows)",
            "    mine = copy.deepcopy(given)",
            *(mark.replace("given[", "mine[") for mark in marks),
            "    with torch.no_grad(), strict():",
            "        want, got = model(*given), compiled(*mine)",
            *_assertion(fault, "(got, mine)", "(want, given)"),
        ]
    )


def _expression(value: Any, live: int) -> str:
    """What makes a value like this one; ``rows`` stands for the size of live rows."""
    if not isinstance(value, Tensor):
        if isinstance(value, (int, float, bool, str, type(None))):
            return "rows" if live and value == live else repr(value)
        raise _NotWritable
    shape = "[" + ", ".join("rows" if live and size == live else str(size) for size in value.shape) + "]"
    where = "" if value.device.type == "cpu" else f", device={str(value.device)!r}"
    if value.dtype == torch.bool:
        return f"torch.rand({shape}{where}) > 0.5"
    if value.is_floating_point():
        return f"torch.randn({shape}, dtype={value.dtype}{where}) * {_spread(value):.3g}"
    if value.is_complex():
        return f"torch.randn({shape}, dtype={value.dtype}{where})"
    low, high = (int(value.min()), int(value.max())) if value.numel() else (0, 0)
    return f"torch.randint({low}, {high + 1}, {shape}, dtype={value.dtype}{where})"


def _spread(value: Tensor) -> float:
    found = value.double().nan_to_num().std().item() if value.numel() > 1 else 1.0
    return found or 1.0


# -- the model


def _model_text(fault: Fault | None, seen: Seen, options: Mapping[str, Any], recipe: Recipe) -> str:
    assert seen.call is not None
    imports = _Imports()
    name = recipe.name
    if ":" in name:
        module, _, attribute = name.partition(":")
        if module.endswith(".py"):
            name = f"{Path(module).resolve()}:{attribute}"
        else:
            imports.path_of(module)
    build = {key: value for key, value in recipe.build.items() if value is not None}
    arguments = "".join(
        f", {key}={value if isinstance(value, torch.dtype) else repr(value)}" for key, value in build.items()
    )
    shown = imports.options(options)
    lengths = recipe.lengths[: seen.last + 1]
    padded = options.get("ladder") is not None
    place = f"{fault.kind}: {fault.place}" if fault else "The model's numbers are not eager's."
    return "\n".join(
        [
            f'"""{place}',
            "",
            "Written by bcg bisect: it fails as long as the difference is there.",
            '"""',
            "",
            "import copy",
            "",
            "import torch",
            "",
            *imports.lines,
            "from bcg_compiler.checks import strict",
            "from bcg_compiler.debug.compare import compare",
            *(["from bcg_compiler.debug.tokens import mark_open, token_dims"] if padded else []),
            "from bcg_compiler.models import zoo",
            "",
            f"built = zoo.build({name!r}{arguments})",
            "eager = copy.deepcopy(built.model)",
            f'compiled = torch.compile(built.model, backend="bcg", options={shown})',
            f"for call, length in enumerate({list(lengths)}):",
            f"    torch.manual_seed(seed := {recipe.seed} + call)",
            "    given = built.make_inputs(length, torch.Generator().manual_seed(seed))",
            "    mine = copy.deepcopy(given)",
            *(["    mark_open(mine, token_dims(built.make_inputs))"] if padded else []),
            "    with torch.inference_mode(), strict():",
            "        torch.manual_seed(seed)",
            "        want = eager(**given)",
            "        torch.manual_seed(seed)",
            "        got = compiled(**mine)",
            *_assertion(fault, "(got, mine)", "(want, given)"),
        ]
    )


def _assertion(fault: Fault | None, got: str, want: str) -> list[str]:
    exact = fault is not None and fault.kind not in ("padding", "compiler") and fault.rows is None
    close = "" if exact else " if not difference.close"
    return [
        f"    differences = [difference for difference in compare({got}, {want}).differences{close}]",
        '    assert not differences, f"call {call}: {differences[0].what}, at most by {differences[0].largest:.3g}"',
        "",
    ]


# -- imports


class _Imports:
    """The lines that make objects of other modules known by a name."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._lines: list[str] = []

    @property
    def lines(self) -> list[str]:
        """All lines, each once."""
        paths = [f"sys.path.insert(0, {path!r})" for path in dict.fromkeys(self._paths)]
        return [*(["import sys", "", *paths] if paths else []), *dict.fromkeys(self._lines)]

    def add(self, value: Any, name: str) -> str:
        """Import ``value`` as ``name``."""
        if isinstance(value, ModuleType):
            self._lines.append(f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}")
            return name
        if isinstance(value, float):  # inf and nan
            self._lines.append(f"from math import {name}")
            return name
        module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if module in (None, "__main__") or not qualified.isidentifier():
            if getattr(torch, name, None) is value:
                self._lines.append(f"from torch import {name}")
                return name
            raise _NotWritable
        if getattr(sys.modules.get(module), qualified, None) is not value:
            raise _NotWritable
        self.path_of(module)
        self._lines.append(f"from {module} import {qualified}" + (f" as {name}" if name != qualified else ""))
        return name

    def of_op(self, node: Node) -> None:
        """Import the module that defines a custom operation."""
        target = node.target
        packet = target if isinstance(target, torch._ops.OpOverloadPacket) else getattr(target, "overloadpacket", None)
        if packet is None or packet._qualified_op_name.startswith(("aten::", "prim")):
            return
        module = defined_in(packet._qualified_op_name)
        if module in (None, "__main__"):
            raise _NotWritable
        self.path_of(str(module))
        self._lines.append(f"import {module}")

    def path_of(self, module: str) -> None:
        """Have a module found that is not installed."""
        found = sys.modules.get(module) or importlib.import_module(module)
        file = Path(inspect.getfile(found)).resolve()
        root = file.parents[len(module.split(".")) - (0 if file.name == "__init__.py" else 1)]
        if "site-packages" not in root.parts and module.partition(".")[0] != "bcg_compiler":
            self._paths.append(str(root))

    def options(self, options: Mapping[str, Any]) -> str:
        """Options as an expression."""
        shown = []
        for name, value in options.items():
            if isinstance(value, Ladder):
                text = repr(list(value))
            elif callable(value):
                text = self.add(value, value.__name__)
            else:
                text = repr(value)
            shown.append(f"{name!r}: {text}")
        return "{" + ", ".join(shown) + "}"
