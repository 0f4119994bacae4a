"""What is said of hoisted plans."""

from collections.abc import Iterator

from bcg_compiler.debug.words import common_text, count, short_path
from bcg_compiler.plan import Plan


def about_hoisted(plan: Plan) -> Iterator[str]:
    """What runs before the first step, for what, and how much of that is a break all the same."""
    for hoisted in plan.hoisted:
        modules = common_text([node.module for node in hoisted.nodes])
        source = hoisted.nodes[0].source
        where = f" in {modules}" * bool(modules) + (f" ({short_path(source.file)}:{source.line})" if source else "")
        still = f"; {count(len(hoisted.eager), 'break')} left" if hoisted.eager else ""
        yield f"first: {hoisted.name}({hoisted.constants}), for {count(len(hoisted.nodes), 'operation')}{where}{still}"
