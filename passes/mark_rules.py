"""Marks what the user's rules name.

op:ns::name            every node that dispatches this op, composite ones included; op:ns::name.overload one overload
module:<glob>          every node inside a module whose path matches, e.g. module:model.layers.*.mlp
class:<glob>           every node inside a module of a class of that name
a predicate            f(facts: NodeFacts) -> bool
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

from bcg_compiler.compat.ops import op_exists, registered_ops
from bcg_compiler.errors import RuleError, nearest
from bcg_compiler.facts import AnnotatedGraph, NodeFacts
from bcg_compiler.options import Rule
from bcg_compiler.passes.result import PassResult


class _Matcher(NamedTuple):
    label: str
    matches: Callable[[NodeFacts], bool]
    #: The names that a rule of this kind could have matched in a graph, to offer the nearest.
    offered: Callable[[AnnotatedGraph], set[str]]


def mark_rules(graph: AnnotatedGraph, *, rules: tuple[Rule, ...]) -> PassResult:
    """Mark every node that a rule matches; the reason names the rule.

    Raises ``RuleError`` for a rule of unknown form, an op that is not registered, and a rule that matches nothing.
    Where Dynamo cut the function into several graphs a rule may be meant for another of them: it is then only noted.
    """
    changes = 0
    notes = []
    for matcher in map(_matcher, rules):
        matched = [n for n, facts in graph.facts.items() if not facts.host_only and matcher.matches(facts)]
        if not matched:
            said = f"Rule {matcher.label!r} matches nothing in this graph."
            if graph.whole:
                raise RuleError(f"{said} {nearest(matcher.label.partition(':')[2], matcher.offered(graph))}")
            notes.append(said)
        for node in matched:
            changes += graph.mark(node, "user_rule", f"rule {matcher.label!r}")
    return PassResult("mark_rules", changes, tuple(notes))


def _matcher(rule: Rule) -> _Matcher:
    if not isinstance(rule, str):
        label = getattr(rule, "__qualname__", None) or type(rule).__name__
        return _Matcher(f"predicate:{label}", rule, lambda graph: set())
    kind, _, pattern = rule.partition(":")
    if kind not in _KINDS or not pattern:
        raise RuleError(
            f"Rule {rule!r} is none of 'op:ns::name[.overload]', 'module:<glob>', 'class:<glob>' or a predicate."
        )
    return _KINDS[kind](rule, pattern)


def _op_rule(rule: str, name: str) -> _Matcher:
    if "::" not in name or not op_exists(name):
        raise RuleError(f"Rule {rule!r} names an op that is not registered. {nearest(name, registered_ops())}")

    def matches(facts: NodeFacts) -> bool:
        return any(op == name or op.partition(".")[0] == name for op in (*facts.aten, facts.op))

    return _Matcher(rule, matches, lambda graph: {op.partition(".")[0] for f in graph.facts.values() for op in f.aten})


def _module_rule(rule: str, glob: str) -> _Matcher:
    return _Matcher(
        rule,
        lambda facts: any(fnmatchcase(path, glob) for path, _ in facts.modules),
        lambda graph: {path for f in graph.facts.values() for path, _ in f.modules if path},
    )


def _class_rule(rule: str, glob: str) -> _Matcher:
    return _Matcher(
        rule,
        lambda facts: any(fnmatchcase(name, glob) for _, name in facts.modules),
        lambda graph: {name for f in graph.facts.values() for _, name in f.modules},
    )


_KINDS: dict[str, Callable[[str, str], _Matcher]] = {"op": _op_rule, "module": _module_rule, "class": _class_rule}
