"""A model called at several lengths, eagerly and compiled, with checks in every replay."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bcg_compiler.backend import segment_compiler
from bcg_compiler.checks import Checks, Fault
from bcg_compiler.compat.inductor import on_cuda
from bcg_compiler.debug.bisect.reference import Boundary, Numbers
from bcg_compiler.debug.compare import Difference, compare
from bcg_compiler.debug.errors import call_eager, model_failed, user_error
from bcg_compiler.debug.tokens import mark_open, token_dims
from bcg_compiler.models.zoo import ZooModel
from bcg_compiler.options import Options
from bcg_compiler.plan import Plan, Step
from bcg_compiler.runtime import programs_of, reset
from bcg_compiler.runtime.watch import watched


@dataclass(frozen=True)
class Seen:
    """What calls of a compiled model have shown.

    ``call``        the first one that differs from eager, from 0; ``None`` if none does. ``last`` is the last one made
    ``difference``  what differs in it first; ``in_graphs`` whether Dynamo's graphs, run as they are, differ there too
    ``faults``      what the checks have found up to there, with the call; ``boundaries`` the values of that call
    ``plans``       of the programs that ran
    ``tensors``     compared in results, inputs and state
    """

    call: int | None
    last: int
    difference: Difference | None
    in_graphs: Difference | None
    faults: tuple[tuple[int, Fault], ...]
    boundaries: tuple[Boundary, ...]
    plans: tuple[Plan, ...]
    replays: int
    tensors: int


class Calls:
    """The calls of one model. In each of them eager code, the compiled model and Dynamo's graphs get equal inputs, one
    after the other: what the model reads on the host is then the same for all of them.
    """

    def __init__(self, built: ZooModel, lengths: Sequence[int], options: Mapping[str, Any], seed: int) -> None:
        self.built = built
        self.lengths = tuple(lengths)
        self.options = dict(options)
        parsed = Options.parse(options)
        self._open = token_dims(built.make_inputs) if parsed.ladder is not None else {}
        self._seed = seed
        self._on_cuda = on_cuda(built.model.parameters())

    def run(
        self,
        *,
        eagerly: Callable[[Step], bool] = lambda step: False,
        looking: bool = False,
        **options: Any,
    ) -> Seen:
        """Compile a copy of the model and call it, up to the first difference.

        If ``looking``, up to one that shows more: what a check has found, or values between steps of a replay.
        ``options`` are put in place of the model's own; segments for which ``eagerly`` says so run their operations.
        """
        reset()
        given = {**self.options, **options}
        compiler = segment_compiler(Options.parse(given), on_cuda=self._on_cuda)
        numbers, found = Numbers(), list[tuple[int, Fault]]()
        call = 0
        checks = Checks(lambda fault: found.append((call, fault)), told=numbers.told, eagerly=eagerly)
        eager, model, graphs = self._copy(), self._copy(), self._copy()
        compiled: Any = torch.compile(model, backend=numbers.compiled(given))
        reference: Any = torch.compile(graphs, backend=numbers.reference())
        tensors, seen, first, in_graphs = 0, None, None, None
        before = set(programs_of())
        with watched(checks):
            for call in range(len(self.lengths)):
                inputs = self._inputs(call)
                want = self._call(self._as_it_is(eager, call), eager, inputs)
                numbers.begin()
                got = self._call(compiled, model, inputs)
                numbers.begin_reference()
                plain = self._call(reference, graphs, inputs)
                programs = [p for p in programs_of() if p not in before and p.plan is not None]
                compared = compare(got, want)
                tensors += compared.tensors
                # Kernels add up in another order in a bucket, and compiled code in one of its own.
                tolerant = compiler != "eager" or any(p.plan is not None and p.plan.padding for p in programs)
                wrong = [d for d in compared.differences if not (tolerant and d.close)]
                if wrong and seen is None:
                    seen, first = call, wrong[0]
                    in_graphs = next(iter(compare(plain, want).differences), None)
                if seen is not None and (found or numbers.boundaries or not looking):
                    break
        plans = tuple(p.plan for p in programs if p.plan is not None)
        replays = sum(p.replays for p in programs)
        return Seen(seen, call, first, in_graphs, tuple(found), tuple(numbers.boundaries), plans, replays, tensors)

    def eager_twice(self) -> Difference | None:
        """What differs first between two copies of the model that are both called eagerly."""
        one, other = self._copy(), self._copy()
        for call in range(len(self.lengths)):
            inputs = self._inputs(call)
            results = [self._call(self._as_it_is(model, call), model, inputs) for model in (one, other)]
            if (found := compare(*results).differences) != ():
                return found[0]
        return None

    def _as_it_is(self, model: torch.nn.Module, call: int) -> Callable[..., Any]:
        return lambda **given: call_eager(model, given, self.lengths[call])

    def _call(self, called: Any, model: torch.nn.Module, given: Mapping[str, Any]) -> Any:
        inputs = copy.deepcopy(dict(given))
        mark_open(inputs, self._open)
        torch.manual_seed(self._seed)
        try:
            with torch.inference_mode():
                result = called(**inputs)
        except Exception as error:
            if (users := user_error(error)) is not None:
                raise users from None
            raise
        return _snapshot(result, inputs, model)

    def _inputs(self, call: int) -> dict[str, Any]:
        torch.manual_seed(self._seed + call)  # for a factory that draws without the generator
        return self.built.make_inputs(self.lengths[call], torch.Generator().manual_seed(self._seed + call))

    def _copy(self) -> torch.nn.Module:
        try:
            return copy.deepcopy(self.built.model)
        except Exception as error:
            raise model_failed(error, "The model cannot be copied for the comparison with eager") from error


def _snapshot(result: Any, inputs: Mapping[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """All that a call leaves: its result, the inputs that it may write, and the buffers of the model, as copies."""
    return copy.deepcopy({"result": result, "inputs": dict(inputs), "state": dict(model.named_buffers())})
