"""Plans of breaks: what the host prepares once a call, for all breaks that share it.

Note [Plan and run]
    Attention libraries split their work in two: a *plan* on the host, which turns the lengths of a batch into index
    buffers at fixed addresses, and a *run* on the device, which reads them. The plan cannot be captured and is needed
    once a call; the run can be captured and is needed once a layer. Declared as one break, a model pays for both at
    each layer, and is cut there. Declared with ``eager_break(plan=...)``, the plan runs before the first segment and
    the run is captured like any operation.

    A plan knows the call by the forward context alone, so that it can run before anything has been computed. Equal
    plans are one: the same function, of the same instance if it takes that, with the same constants. A captured run
    sees nothing of the context but the bucket, which is the same at each replay: whatever else it read would be frozen.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bcg_compiler.context import PLANNED, forward_context, published
from bcg_compiler.errors import BreakArgumentError, nearest


@dataclass(frozen=True, eq=False)
class PlanFunction:
    """A declared plan: its function, and the names of the body's parameters that it takes.

    ``body`` is the signature of the break's body, ``instance`` the name of the parameter that takes its instance, ""
    for a function.
    """

    name: str
    fn: Callable[..., Any]
    wants: tuple[str, ...]
    body: inspect.Signature
    instance: str

    @classmethod
    def declare(cls, fn: Callable[..., Any], break_name: str, body: Callable[..., Any], takes_instance: bool) -> Any:
        """Check a plan against the body. Raises ``BreakArgumentError`` where it takes what the body does not have."""
        if not inspect.isfunction(fn):
            raise BreakArgumentError(
                f"plan= of break {break_name!r} is a {type(fn).__name__}. It must be a function of some of the break's "
                f"parameters."
            )
        known = inspect.signature(body)
        wants = tuple(inspect.signature(fn).parameters)
        for name in wants:
            if name not in known.parameters:
                raise BreakArgumentError(
                    f"The plan {fn.__qualname__} of break {break_name!r} takes {name!r}, which is no parameter of the "
                    f"break. {nearest(name, known.parameters)} What differs from call to call a plan reads from "
                    f"bcg.current_context()."
                )
        instance = next(iter(known.parameters)) if takes_instance else ""
        return cls(f"{fn.__module__}.{fn.__qualname__}", fn, wants, known, instance)

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What the plan is given besides the instance, of the arguments of a call of the break."""
        receiver = (None,) if self.instance else ()
        bound = self.body.bind(*receiver, *args, **kwargs)
        bound.apply_defaults()
        return {name: bound.arguments[name] for name in self.wants if name != self.instance}

    def call(
        self, receiver: Callable[[], tuple[Any, ...]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> "PlanCall":
        """The plan that a call of the break needs. ``receiver`` gives ``(instance,)``, ``()`` for a function."""
        given = self.arguments(args, kwargs)
        owner = id(receiver()[0]) if self.instance in self.wants else None
        text = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return PlanCall(self, (self.fn, owner, text), text, receiver, given)


@dataclass(frozen=True, eq=False)
class PlanCall:
    """A plan with its arguments. Calls of equal ``key`` are one plan; ``text`` shows the constants."""

    function: PlanFunction
    key: tuple[Any, ...]
    text: str
    receiver: Callable[[], tuple[Any, ...]]
    given: Mapping[str, Any]

    def __call__(self) -> None:
        """Run the plan, unless the program that is running has done so in this call.

        Outside of programs nothing tells where a forward begins, so it runs each time.
        """
        done = published(PLANNED)
        if done is not None and self.key in done:
            return
        named = dict(self.given)
        if self.function.instance in self.function.wants:
            named[self.function.instance] = self.receiver()[0]
        rows = published("bucket_rows")
        with forward_context(
            bucket_rows=published("live_rows") if rows is None else rows, capturing=bool(published("capturing"))
        ):
            try:
                self.function.fn(**named)
            except Exception as error:
                error.add_note(f"In {self.function.name}({self.text}), the plan of a break{_when()}.")
                raise
        if done is not None:
            done.add(self.key)


def _when() -> str:
    """For which capture the plan of now is, as words."""
    if not published("capturing"):
        return ""
    rows = published("bucket_rows")
    return ", for a capture" if rows is None else f", for the capture of bucket {rows}"
