"""A plan as a picture: the text that Graphviz's ``dot`` draws."""

from collections.abc import Iterable

from bcg_compiler.plan import Plan, Step

#: How many values an edge names; of more it says how many.
NAMED = 3


def plan_dot(plan: Plan) -> str:
    """The steps from top to bottom, segments blue and breaks orange; an edge for the values that one gives another.

    Parameters, buffers and constants are left out.
    """
    lines = [
        "digraph plan {",
        '  node [shape=box, style=filled, fontname="monospace"];',
        '  edge [fontname="monospace"];',
    ]
    given = [ordinal for ordinal in plan.inputs if plan.value(ordinal).kind in ("input", "size", "number")]
    made_by = {ordinal: "given" for ordinal in given}
    made_by |= {ordinal: f"step_{step.index}" for step in plan.steps for ordinal in step.outputs}
    lines.append('  given [label="inputs", shape=ellipse, fillcolor=white];')
    for step in plan.steps:
        lines.append(f"  step_{step.index} [label={_label(step)}, fillcolor={_color(step)}];")
    lines.append('  returned [label="results", shape=ellipse, fillcolor=white];')
    for step in plan.steps:
        lines += _edges(plan, made_by, step.inputs, f"step_{step.index}")
    lines += _edges(plan, made_by, plan.outputs, "returned")
    pairs = zip(plan.steps, plan.steps[1:], strict=False)
    lines += [f"  step_{a.index} -> step_{b.index} [style=invis];" for a, b in pairs]  # in the order they run
    return "\n".join([*lines, "}"]) + "\n"


def _color(step: Step) -> str:
    return "lightblue" if step.kind == "segment" else "orange"


def _label(step: Step) -> str:
    modules = [node.module for node in step.nodes if node.module]
    where = " → ".join(dict.fromkeys((modules[0], modules[-1]))) if modules else ""
    ops, kernels = (f"{n} {word}{'s' * (n != 1)}" for n, word in ((len(step.nodes), "op"), (step.kernels, "kernel")))
    lines = [f"{step.index} {step.kind}", f"{ops}, {kernels}", where]
    if step.kind == "break":
        lines += [f"{reason.code}: {reason.op}" for reason in step.reasons[:NAMED]]
        lines += [f"and {len(step.reasons) - NAMED} more"] * (len(step.reasons) > NAMED)
    return _quoted(line for line in lines if line)


def _edges(plan: Plan, made_by: dict[int, str], read: Iterable[int], reader: str) -> list[str]:
    values: dict[str, list[int]] = {}
    for ordinal in dict.fromkeys(read):
        if ordinal in made_by and made_by[ordinal] != reader:
            values.setdefault(made_by[ordinal], []).append(ordinal)
    return [f"  {maker} -> {reader} [label={_values(plan, ordinals)}];" for maker, ordinals in values.items()]


def _values(plan: Plan, ordinals: list[int]) -> str:
    named = [plan.value(ordinal) for ordinal in ordinals[:NAMED]]
    lines = [f"{value.name} {', '.join(map(str, value.specs)) or value.size}".rstrip() for value in named]
    return _quoted([*lines, *[f"and {len(ordinals) - NAMED} more"] * (len(ordinals) > NAMED)])


def _quoted(lines: Iterable[str]) -> str:
    text = "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return f'"{text}"'
