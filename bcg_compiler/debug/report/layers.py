"""The steps of a plan by the layers of the model: a row for each layer, and in it the parts of steps that it is."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from bcg_compiler.debug.words import common_text
from bcg_compiler.plan import Plan

#: How many modules name a row that is no layer.
MOST_MODULES = 2


@dataclass(frozen=True)
class Piece:
    """The part of a step that lies in one layer: its operations, how many kernels they launch, and whether the step
    ``begins`` and ``ends`` there.
    """

    step: int
    ops: int
    kernels: int
    begins: bool
    ends: bool


@dataclass(frozen=True)
class Row:
    """A layer, or what runs before, between or after them, with its pieces in the order they run."""

    label: str
    pieces: tuple[Piece, ...]


def layer_of(module: str) -> str:
    """The path up to its first number: ``model.layers.3`` of ``model.layers.3.mlp.experts.0``; "" without a number."""
    parts = module.split(".")
    for position, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: position + 1])
    return ""


def rows_of(plan: Plan) -> list[Row]:
    """The layers in the order they are first reached.

    What belongs to no layer (a rotary embedding, the head) is in a row of its own before the first and after the last
    layer, and elsewhere with the layer that ran before it.
    """
    places = [(step.index, position, node) for step in plan.steps for position, node in enumerate(step.nodes)]
    layers = [layer_of(node.module) for _, _, node in places]
    inside = [position for position, layer in enumerate(layers) if layer]
    first, last = (inside[0], inside[-1]) if inside else (len(places), -1)
    names: dict[str, dict[str, None]] = {}
    found: dict[str, dict[int, list[int]]] = {}
    now = ""
    for at, (step, position, node) in enumerate(places):
        if at < first:
            now = "before"
        elif at > last:
            now = "after"
        else:
            now = layers[at] or now
        if now in ("before", "after"):
            names.setdefault(now, {})[node.module] = None
        found.setdefault(now, {}).setdefault(step, []).append(position)
    return [
        Row(_label(key, names.get(key)), tuple(_piece(plan, step, nodes) for step, nodes in steps.items()))
        for key, steps in found.items()
    ]


def _label(key: str, modules: Mapping[str, None] | None) -> str:
    if modules is None:
        return key
    named = [module for module in modules if module] or ["the model itself"]
    return ", ".join(named[:MOST_MODULES]) + (" …" if len(named) > MOST_MODULES else "")


def _piece(plan: Plan, index: int, positions: Sequence[int]) -> Piece:
    nodes = plan.steps[index].nodes
    return Piece(
        step=index,
        ops=len(positions),
        kernels=sum(nodes[position].kernels for position in positions),
        begins=positions[0] == 0,
        ends=positions[-1] == len(nodes) - 1,
    )


def look(row: Row, looks: Sequence[Hashable]) -> Hashable:
    """Rows of equal looks are shown once; ``looks`` are those of the steps."""
    return tuple((looks[p.step], p.ops, p.kernels, p.begins, p.ends) for p in row.pieces)


def label_of(rows: Sequence[Row]) -> str:
    """One name for rows that are alike."""
    return common_text([row.label for row in rows])
