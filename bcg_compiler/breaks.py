"""Break functions: plain Python calls that no graph may hold. ``@eager_break`` declares one, ``call_with_break`` makes
one in place.

Note [How a break passes through Dynamo]
    A custom op is too narrow for a break: it needs annotations, refuses dictionaries and results that alias an
    argument, and costs about 10 µs a call. So a break is a Python function which Dynamo is told to keep as one opaque
    call (``torch.compiler.allow_in_graph``). While Dynamo traces, the function sees fake tensors and answers with
    fakes; the node's target is then the function itself, and a program calls the body directly.

    Dynamo's graph holds only tensors, numbers and plain constants. Two things must pass all the same:

    * The instance of a method. The wrapper, which Dynamo inlines, hands on ``id(self)``: Dynamo turns that into a
      constant and guards on the identity of the object, so another instance means another compile. The backend turns
      it back into the object, at a time when the guard proves it alive.
    * A result that is a dictionary or nested. The opaque call returns the flat list of its tensors, and its
      structure, known once the fakes are made, comes back as a constant.
"""

import enum
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, overload

import torch

from bcg_compiler.compat.fake import is_fake_call, is_functional_call, object_at, tree_leaves
from bcg_compiler.compat.new_sizes import sizes_from_bodies
from bcg_compiler.context import published
from bcg_compiler.errors import BreakArgumentError, BreakGradError, BreakMutationError, nearest
from bcg_compiler.hoisting import PlanCall, PlanFunction

#: What a break may be declared as: reason codes of ``docs/reasons.md``. Passes find the parts of a model by them.
KINDS = ("eager_break", "attention", "dsa_indexer", "logits_gate", "a2a_moe", "cp_gather_tail")

F = TypeVar("F", bound=Callable[..., Any])

_REST, _KEYWORDS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

#: What a break may be given besides tensors: constants that a graph can hold.
CONSTANTS = (
    int,
    float,
    complex,
    bool,
    str,
    type(None),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


@dataclass(frozen=True, eq=False)
class Break:
    """The declaration of one break function; see ``eager_break`` for the meaning of each field."""

    name: str
    fn: Callable[..., Any]
    takes_instance: bool = False
    mutates_args: tuple[str, ...] = ()
    fake: Callable[..., Any] | None = None
    capture_stub: Callable[..., Any] | None = None
    barrier: Callable[[], None] | None = None
    writes_every_row: bool = False
    reads_live_rows: bool = False
    reason: str = "eager_break"
    plan: PlanFunction | None = None
    reserve_bytes: int = 0
    bucket_multiple: int = 1
    parameters: tuple[str, ...] = field(init=False)
    rest: str = field(init=False)
    keywords: str = field(init=False)

    def __post_init__(self) -> None:
        if self.reason not in KINDS:
            raise BreakArgumentError(
                f"Break {self.name!r} declares reason={self.reason!r}, which is no kind of break. "
                f"{nearest(str(self.reason), KINDS)} Leave it out for a break of no particular kind."
            )
        for declared, least in (("reserve_bytes", 0), ("bucket_multiple", 1)):
            number = getattr(self, declared)
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise BreakArgumentError(
                    f"Break {self.name!r} declares {declared}={number!r}; "
                    f"it must be a whole number of at least {least}."
                )
        try:
            found = list(inspect.signature(self.fn).parameters.values())
        except (TypeError, ValueError):
            found = []
        found = found[1:] if self.takes_instance and found and found[0].kind is not _REST else found
        names = [p.name for p in found]
        object.__setattr__(self, "parameters", tuple(p.name for p in found if p.kind not in (_REST, _KEYWORDS)))
        object.__setattr__(self, "rest", next((p.name for p in found if p.kind is _REST), ""))
        object.__setattr__(self, "keywords", next((p.name for p in found if p.kind is _KEYWORDS), ""))
        unknown = [name for name in self.mutates_args if names and name not in names]
        if unknown:
            raise BreakArgumentError(
                f"Break {self.name!r} declares mutates_args={unknown}, but its parameters are {', '.join(names)}."
            )

    def run(self, receiver: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the body for real. ``receiver`` is ``(instance,)`` for a method and ``()`` for a function.

        Its plan, if it has one, runs before. Raises ``BreakMutationError`` if the body wrote into an argument that it
        does not declare: whatever is planned around the break (order, shared memory) relies on the declaration.
        """
        if self.plan is not None:
            self.plan.call(lambda: receiver, args, kwargs)()
        watched = [
            (name, tensor, tensor._version)
            for name, value in self.named(args, kwargs)
            if name not in self.mutates_args
            for tensor in _tensors(value)
            if not tensor.is_inference()  # inference tensors carry no version
        ]
        result = self.fn(*receiver, *args, **kwargs)
        for name, tensor, version in watched:
            if tensor._version != version and not self._shares_with_mutated(tensor, args, kwargs):
                raise BreakMutationError(
                    f"Break {self.name!r} wrote into its argument {name!r}, which it does not declare. "
                    f"Add {name!r} to mutates_args of @eager_break."
                )
        return result

    def infer(self, receiver: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the break returns for fake arguments: what ``fake`` says, else nothing (it only writes)."""
        if self.fake is None:
            return None
        with sizes_from_bodies((args, kwargs)):
            return self.fake(*receiver, *args, **kwargs)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """Each argument with the name of the parameter that takes it: that of ``*args`` for the surplus ones."""
        surplus = (self.rest or str(i) for i in range(len(self.parameters), len(args)))
        named = zip((*self.parameters, *surplus), args, strict=False)
        keywords = ((k if k in self.parameters or not self.keywords else self.keywords, v) for k, v in kwargs.items())
        return [*named, *keywords]

    def mutated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors among the arguments that the break declares to write."""
        return [t for name, value in self.named(args, kwargs) if name in self.mutates_args for t in _tensors(value)]

    def _shares_with_mutated(self, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        # Views share one version counter, so a declared write shows on every argument over the same storage.
        return any(_same_storage(t, tensor) for t in self.mutated(args, kwargs))


class _Shape(NamedTuple):
    """What a result must be: sizes that are symbolic when compiled are ``None``, any size fits them."""

    dtype: torch.dtype
    sizes: tuple[int | None, ...]
    device: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Shape":
        sizes = tuple(size if isinstance(size, int) else None for size in tensor.shape)
        return cls(tensor.dtype, sizes, tensor.device.type)

    def fits(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.dtype == self.dtype
            and tensor.device.type == self.device
            and tensor.dim() == len(self.sizes)
            and all(want is None or want == size for want, size in zip(self.sizes, tensor.shape, strict=True))
        )

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.sizes)
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}] on {self.device}"


class BoundBreak:
    """A break of a compiled graph: its declaration with the instance it was traced with. What programs call.

    Returns the flat list of the result's tensors (see Note [How a break passes through Dynamo]), or ``None``.
    The instance is held weakly: a program must not keep a deleted model alive.
    """

    def __init__(self, spec: Break, instance: Any = None) -> None:
        self.spec = spec
        self.__name__ = spec.name.rpartition(".")[2]
        self._expected: tuple[Any, list[_Shape]] | None = None
        self._receiver: Callable[[], tuple[Any, ...]] = tuple
        if spec.takes_instance:
            self._receiver = _weak_receiver(spec.name, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> list[torch.Tensor] | None:
        leaves: list[torch.Tensor] = []
        if is_fake_call((args, kwargs)):
            structure = _describe(self.spec.name, self.spec.infer(self._receiver(), args, kwargs), leaves)
            self._expected = structure, [_Shape.of(leaf) for leaf in leaves]
            _structures[self.spec.name] = _structures[_INLINE] = structure
        else:
            result = self.spec.run(self._receiver(), args, kwargs)
            self._check_result(_describe(self.spec.name, result, leaves), leaves)
        return leaves or None

    @property
    def identity(self) -> tuple[int, ...]:
        """The same for calls of one break, and of one instance: those are one operation."""
        return id(self.spec), *map(id, self._receiver())

    def plan_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlanCall | None:
        """The plan that a call with these arguments needs; ``None`` if the break has none."""
        return None if self.spec.plan is None else self.spec.plan.call(self._receiver, args, kwargs)

    def direct(self) -> Callable[..., Any]:
        """The body with nothing around it but what gives its results as a flat list: for replays.

        What ``__call__`` checks was checked when the program was warmed up, and bridges check the form of each result.
        """
        (structure, _), fn = self._expected or ("none", ()), self.spec.fn
        if self.spec.takes_instance:
            receiver = self._receiver

            def method(*args: Any, **kwargs: Any) -> Any:
                return self.spec.fn(*receiver(), *args, **kwargs)

            fn = method
        if self.spec.plan is not None:
            fn = self._planned(fn, self.spec.plan)
        if structure == "none":
            return fn
        if structure == "tensor":
            return lambda *args, **kwargs: (fn(*args, **kwargs),)
        return self._flat(fn, structure)

    def _planned(self, fn: Callable[..., Any], plan: PlanFunction) -> Callable[..., Any]:
        def planned(*args: Any, **kwargs: Any) -> Any:
            plan.call(self._receiver, args, kwargs)()
            return fn(*args, **kwargs)

        return planned

    def at_capture(self) -> Callable[..., Any]:
        """What stands in for the body while a program is captured: the barrier, then the stub.

        Gives the stub's results as a flat list, ``None`` if it returned nothing.
        """

        def stand_in(*args: Any, **kwargs: Any) -> list[torch.Tensor] | None:
            if self.spec.barrier is not None and not published("lined_up"):
                self.spec.barrier()
            if self.spec.capture_stub is None:
                return None
            result = self.spec.capture_stub(*self._receiver(), *args, **kwargs)
            if result is None or self._expected is None or self._expected[0] == "none":
                return None
            leaves: list[torch.Tensor] = []
            self._check_result(_describe(self.spec.name, result, leaves), leaves, "The capture_stub of break")
            return leaves

        return stand_in

    def _flat(self, fn: Callable[..., Any], structure: Any) -> Callable[..., Any]:
        def flat(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
            leaves: list[torch.Tensor] = []
            if _describe(self.spec.name, fn(*args, **kwargs), leaves) != structure:
                raise BreakArgumentError(f"Break {self.spec.name!r} returned another structure than at its first run.")
            return leaves

        return flat

    def _check_result(self, structure: Any, leaves: list[torch.Tensor], part: str = "Break") -> None:
        """What was compiled relies on the fake: a result of another form would go unseen to wrong readers."""
        if self._expected is None:
            return
        wanted, shapes = self._expected
        who = f"{part} {self.spec.name!r}"
        if structure != wanted:
            said = "nothing" if wanted == "none" else str(wanted)
            raise BreakArgumentError(
                f"{who} returned {structure}, but it was compiled as returning {said}. Give @eager_break a fake=: a "
                f"function of the same arguments that returns empty tensors of the result's shapes, in the same "
                f"structure."
            )
        for position, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True)):
            if not shape.fits(leaf):
                raise BreakArgumentError(
                    f"Result {position} of {who[0].lower()}{who[1:]} is {_Shape.of(leaf)}, but its fake= says {shape}."
                )


@overload
def eager_break(fn: F) -> F: ...
@overload
def eager_break(
    *,
    mutates_args: tuple[str, ...] | list[str] = (),
    fake: Callable[..., Any] | None = None,
    capture_stub: Callable[..., Any] | None = None,
    barrier: Callable[[], None] | None = None,
    writes_every_row: bool = False,
    reads_live_rows: bool = False,
    reason: str = "eager_break",
    plan: Callable[..., None] | None = None,
    reserve_bytes: int = 0,
    bucket_multiple: int = 1,
) -> Callable[[F], F]: ...
def eager_break(fn: Any = None, **declared: Any) -> Any:
    """Declare a function or method as a break: in a compiled model its body always runs eagerly.

    Outside of compiled code the function is an ordinary call. Arguments may be tensors, constants and lists, tuples
    and dictionaries of them; a live object is refused (it would be frozen: publish it with ``forward_context``). The
    instance of a method is bound when the model is compiled and is not an argument.

    ``mutates_args``      names of the parameters that the body writes into. Checked whenever it runs.
    ``fake``              function of the same arguments which returns empty tensors of the result's shapes and
                          dtypes, or an argument itself where the result is one. Not needed by a break that returns
                          nothing. A size that only the body knows is
                          ``torch.library.get_ctx().new_dynamic_size()``.
    ``capture_stub``      called with the body's arguments in its place while a program is captured: it may fill
                          buffers that the graph allocated, and what it returns fills those of the break's results.
                          Never the caller's memory (a KV cache): a capture has no effects.
    ``barrier``           called before the stub at each capture and at no replay, to line up ranks.
    ``writes_every_row``  the body writes all rows of its results, padded ones too: the runner need not zero them.
    ``reads_live_rows``   the body reads only the live rows, so padding cannot reach its results.
    ``reason``            what kind of break it is, by which passes know it and the plan shows it: ``attention``,
                          ``dsa_indexer``, ``logits_gate``, ``a2a_moe``, ``cp_gather_tail``; ``eager_break`` if it is
                          none of these.
    ``plan``              what the host does for the body once a call (``docs/hoisting.md``): a function of some of the
                          body's constant parameters, ``self`` included, which reads the forward context and writes
                          buffers that the body reads. It runs before the first segment, once for all breaks that share
                          it, and the body is captured if it can be.
    ``reserve_bytes``     device memory that the body takes for itself beside its arguments, once for all calls and
                          places: the buffers of a communication library. A term of the memory forecast.
    ``bucket_multiple``   every bucket of a ladder must be a multiple of this: the body cannot take other row counts.

    Raises ``BreakArgumentError`` for a live object, an unknown ``reason`` or a number out of range, ``BreakGradError``
    under grad mode for a tensor that requires grad, ``BreakMutationError`` for an undeclared write.
    """
    if fn is None:
        return functools.partial(_declare, **declared)
    return _declare(fn, **declared)


def call_with_break(
    fn: Callable[..., Any],
    *args: Any,
    mutates_args: tuple[str, ...] = (),
    fake: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function as a break, in place of the call itself: give it the function and its arguments.

    ``fn`` and ``fake`` are functions of a module, methods or modules: things with an identity from call to call (not
    a lambda or a function made inside the forward, which would be another one each time). Dynamo of torch 2.11 takes
    none of torch's own functions there. Meaning, checks and errors are those of ``eager_break``.
    """
    if not torch.compiler.is_dynamo_compiling():
        spec, receiver = _inline_spec(fn, tuple(mutates_args), fake)
        _check_arguments(spec.name, spec.parameters, args, kwargs)
        return spec.run(receiver, args, kwargs)
    # Traced from here on: only ids and constants go into the graph.
    owner = 0
    function: Any = fn
    if isinstance(fn, types.MethodType):
        owner, function = id(fn.__self__), fn.__func__
    _check_arguments("call_with_break", (), args, kwargs)
    fake_id = 0 if fake is None else id(fake)
    leaves = _opaque_inline(id(function), owner, fake_id, tuple(mutates_args), *args, **kwargs)
    return _rebuild(_structure(_INLINE), leaves)


def as_bound_break(target: Any, args: tuple[Any, ...]) -> tuple[BoundBreak, tuple[Any, ...]] | None:
    """For a node of Dynamo's graph: the bound break it calls and its true arguments, or ``None`` if it is no break."""
    bind = getattr(target, "__bcg_bind__", None)
    return None if bind is None else bind(args)


def _declare(fn: Any, **declared: Any) -> Any:
    if isinstance(fn, staticmethod):
        return staticmethod(_declare_function(fn.__func__, takes_instance=False, **declared))
    if not inspect.isfunction(fn):
        raise BreakArgumentError(
            f"@eager_break takes a function or a method of a class, not {_kind(fn)}. "
            f"For an object with a __call__ use bcg.call_with_break(obj, ...)."
        )
    # The class does not exist yet while its body runs, but the qualified name tells that there will be one.
    in_class = fn.__qualname__.rpartition(".")[0].rpartition(".")[2] not in ("", "<locals>")
    takes_self = next(iter(inspect.signature(fn).parameters), "") == "self"
    return _declare_function(fn, takes_instance=in_class or takes_self, **declared)


def _declare_function(fn: Callable[..., Any], *, takes_instance: bool, **declared: Any) -> Callable[..., Any]:
    declared["mutates_args"] = tuple(declared.get("mutates_args", ()))
    name = f"{fn.__module__}.{fn.__qualname__}"
    if declared.get("plan") is not None:
        declared["plan"] = PlanFunction.declare(declared["plan"], name, fn, takes_instance)
    spec = Break(name=name, fn=fn, takes_instance=takes_instance, **declared)
    parameters = spec.parameters

    def bind(args: tuple[Any, ...]) -> tuple[BoundBreak, tuple[Any, ...]]:
        instance = object_at(args[0]) if takes_instance else None
        return BoundBreak(spec, instance), (args[1:] if takes_instance else args)

    opaque = _keep_in_graph(name, bind)

    def call(*args: Any, **kwargs: Any) -> Any:
        receiver = args[:1] if takes_instance else ()
        given = args[1:] if takes_instance else args
        if takes_instance and (not receiver or isinstance(receiver[0], torch.Tensor)):
            raise BreakArgumentError(
                f"Break {name!r} is a method and was called without its instance. For a static method put "
                f"@eager_break above @staticmethod."
            )
        _check_arguments(name, parameters, given, kwargs)
        if not torch.compiler.is_dynamo_compiling():
            return spec.run(receiver, given, kwargs)
        leaves = opaque(id(receiver[0]), *given, **kwargs) if takes_instance else opaque(*given, **kwargs)
        return _rebuild(_structure(name), leaves)

    return functools.wraps(fn)(call)


def _keep_in_graph(
    name: str, bind: Callable[[tuple[Any, ...]], tuple[BoundBreak, tuple[Any, ...]]]
) -> Callable[..., Any]:
    """The function that stands in Dynamo's graph for a break: fakes in, fakes out; bound by the backend."""

    def opaque(*args: Any, **kwargs: Any) -> list[torch.Tensor] | None:
        if is_functional_call((args, kwargs)):
            raise BreakArgumentError(
                f"Break {name!r} reached AOTAutograd, which would drop its body. Compile with backend='bcg'."
            )
        bound, given = bind(args)
        return bound(*given, **kwargs)

    opaque.__name__ = opaque.__qualname__ = name.rpartition(".")[2]
    opaque.__bcg_bind__ = bind  # type: ignore[attr-defined]
    torch.compiler.allow_in_graph(opaque)
    return opaque


_INLINE = "call_with_break"


def _bind_inline(args: tuple[Any, ...]) -> tuple[BoundBreak, tuple[Any, ...]]:
    function, owner, fake, mutates_args, *given = args
    fn = object_at(function)
    if owner:
        fn = types.MethodType(fn, object_at(owner))
    spec, receiver = _inline_spec(fn, tuple(mutates_args), object_at(fake) if fake else None, key=_INLINE)
    return BoundBreak(spec, *receiver), tuple(given)


def _inline_spec(
    fn: Callable[..., Any], mutates_args: tuple[str, ...], fake: Callable[..., Any] | None, key: str | None = None
) -> tuple[Break, tuple[Any, ...]]:
    """The declaration of ``call_with_break(fn, ...)`` and the receiver to run it with.

    ``fake`` sees the same arguments as ``fn`` without the instance.
    """
    owner = getattr(fn, "__self__", None) if isinstance(fn, types.MethodType) else None
    if owner is None and not inspect.isfunction(fn) and not inspect.isbuiltin(fn):
        owner, function = fn, type(fn).__call__
    else:
        function = fn.__func__ if isinstance(fn, types.MethodType) else fn
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(fn).__name__)}"
    if owner is None:
        return Break(name, function, mutates_args=mutates_args, fake=fake), ()
    given_fake = (lambda _, *args, **kwargs: fake(*args, **kwargs)) if fake is not None else None
    return Break(name, function, takes_instance=True, mutates_args=mutates_args, fake=given_fake), (owner,)


_opaque_inline = _keep_in_graph(_INLINE, _bind_inline)

# What the last fake call of each break returned, by name; read back at once by the wrapper that Dynamo is tracing.
_structures: dict[str, Any] = {}


@torch.compiler.assume_constant_result
def _structure(name: str) -> Any:
    return _structures[name]


def _describe(name: str, result: Any, leaves: list[torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        leaves.append(result)
        return "tensor"
    if result is None:
        return "none"
    if type(result) in (tuple, list):
        return (type(result).__name__, *(_describe(name, item, leaves) for item in result))
    if type(result) is dict:
        return ("dict", tuple(result), *(_describe(name, item, leaves) for item in result.values()))
    raise BreakArgumentError(
        f"Break {name!r} returned {_kind(result)}. A break returns tensors, None, and tuples, lists and dictionaries "
        f"of them; a number would be frozen when the model is compiled: return it as a tensor."
    )


def _rebuild(structure: Any, leaves: Any) -> Any:
    """The result with its structure, from the flat list. Inlined by Dynamo."""
    return _take(structure, list(leaves) if leaves is not None else [])


def _take(structure: Any, leaves: list[Any]) -> Any:
    if structure == "tensor":
        return leaves.pop(0)
    if structure == "none":
        return None
    if structure[0] == "dict":
        return {key: _take(part, leaves) for key, part in zip(structure[1], structure[2:], strict=True)}
    items = [_take(part, leaves) for part in structure[1:]]
    return tuple(items) if structure[0] == "tuple" else items


def _check_arguments(name: str, parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse live objects, and under grad mode tensors that require grad. Inlined by Dynamo: keep it plain."""
    for position, value in enumerate(args):
        label = parameters[position] if position < len(parameters) else str(position)
        _check_argument(name, label, value)
    for label, value in kwargs.items():
        _check_argument(name, label, value)


def _check_argument(name: str, label: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if torch.is_grad_enabled() and value.requires_grad:
            raise BreakGradError(
                f"Break {name!r} has no gradient, but its argument {label!r} requires grad. Call the model under "
                f"torch.no_grad() or torch.inference_mode(), or detach the argument."
            )
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_argument(name, label, item)
    elif isinstance(value, dict):
        for item in value.values():
            _check_argument(name, label, item)
    elif not isinstance(value, (*CONSTANTS, torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise BreakArgumentError(
            f"Argument {label!r} of break {name!r} is a live object of type {type(value).__name__}. It would be frozen "
            f"when the model is compiled. Publish it with bcg.forward_context(...) and read it in the body with "
            f"bcg.current_context()."
        )


def _weak_receiver(name: str, instance: Any) -> Callable[[], tuple[Any, ...]]:
    try:
        reference = weakref.ref(instance)
    except TypeError:  # no __weakref__ slot: such an object can only be held
        return lambda: (instance,)

    def receiver() -> tuple[Any, ...]:
        alive = reference()
        if alive is None:
            raise ReferenceError(f"The object whose method is break {name!r} was deleted.")
        return (alive,)

    return receiver


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
