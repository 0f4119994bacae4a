"""The fixture ``bcg_plan``: what a model compiles to, to compare with a snapshot or to look into."""

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bcg_compiler.compat.fake import fake_mode_of
from bcg_compiler.plan import Plan, plan_text
from bcg_compiler.runtime import programs_of, reset
from bcg_compiler.testing.snapshots import Snapshots


@dataclass(frozen=True)
class TakenPlans:
    """What a model has compiled to: a plan for each graph, ``None`` for one that runs unsplit."""

    plans: tuple[Plan | None, ...]
    snapshots: Snapshots

    @property
    def text(self) -> str:
        """The stable text of the plans. It has no hash, which would differ wherever anything does."""
        texts = (plan_text(plan) if plan is not None else "unsplit\n" for plan in self.plans)
        return "\n".join(re.sub(r"^plan \w+: ", "plan: ", text) for text in texts)

    def matches_snapshot(self, name: str = "") -> bool:
        """``True``, if the text is that of the snapshot; else an ``AssertionError`` says what has changed.

        Snapshots of one test without a name are numbered. ``--bcg-update`` writes them.
        """
        __tracebackhide__ = True
        major, minor, *_ = torch.__version__.split(".")
        self.snapshots.check(self.text, f"{major}.{minor}", name)
        return True


class PlanFixture:
    """``bcg_plan(model, *inputs, options=None, **kwargs)``."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    def __call__(
        self, model: Callable[..., Any], *inputs: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> TakenPlans:
        """Compile ``model`` with ``options`` and call it once, with real tensors or fakes; the plans of its graphs.

        Called under ``torch.inference_mode()``. Drops all compiled code of the process first (``bcg_compiler.reset``).
        Raises what the model or the backend raises, and ``ValueError`` if nothing was compiled.
        """
        reset()
        before = set(programs_of())
        held = model.parameters() if isinstance(model, torch.nn.Module) else ()
        mode = fake_mode_of(tree_leaves((inputs, kwargs, list(held))))
        compiled = torch.compile(model, backend="bcg", options=dict(options) if options else None)
        with torch.inference_mode(), mode or nullcontext():
            compiled(*inputs, **kwargs)
        plans = tuple(program.plan for program in programs_of() if program not in before)
        if not plans:
            raise ValueError("Nothing was compiled: Dynamo found no operation on tensors in the call.")
        return TakenPlans(plans, self._snapshots)
