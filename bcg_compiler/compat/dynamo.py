"""What Dynamo leaves behind: where an input comes from, the module path and source line of a node, its own counters,
and which compiled callable is being run.
"""

import functools
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch._dynamo.utils
from torch._guards import TracingContext
from torch.fx import GraphModule, Node

from bcg_compiler.compat.fake import object_at

_TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
OWN_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: The models of this package are users of the compiler: theirs are lines to show.
_MODELS_DIR = os.path.join(OWN_DIR, "models") + os.sep
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$')
_MODULES = re.compile(r"\._modules\['([^']*)'\]|\._modules\[\"([^\"]*)\"\]")
_MEMBERS = re.compile(r"\._(?:parameters|buffers)\['([^']*)'\]")
_LOCAL = re.compile(r"^L\['[^']*'\](?=[.\[])")
_ROOT = re.compile(r"^[LG]\['[^']*'\](?:\[\d+\])*(?:\.__self__)?")
_ATTRIBUTE = re.compile(r"\.[A-Za-z_]\w*$|\.__dict__\[")


def source_name(node: Node) -> str:
    """Where Dynamo got a placeholder from, e.g. ``L['x'].size()[0]``; ``""`` if it does not say."""
    return name_of(getattr(node, "_dynamo_source", None))


def name_of(source: Any) -> str:
    """The text of one of Dynamo's sources; "" if there is none."""
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)  # a method up to torch 2.12, a property since


def owner_of(node: Node) -> type | None:
    """The class of the object that a placeholder is an attribute of; ``None`` if it is an argument by itself, or
    nothing is known. To be asked while a backend is called: Dynamo then has the arguments of the call.
    """
    source = getattr(node, "_dynamo_source", None)
    base = getattr(source, "base", None)
    if base is None or not hasattr(source, "member"):
        return None
    found = _found(name_of(base))
    return None if found is None else type(found)


def is_of_model(node: Node) -> bool:
    """Whether a placeholder belongs to a module, at whatever depth, or to the program: a global. As ``owner_of``."""
    source = source_name(node)
    root = _LOCAL.match(source)
    return source.startswith("G[") or (root is not None and isinstance(_found(root[0]), torch.nn.Module))


def _found(source: str) -> Any:
    """The object of a source in the call that is traced, found as Dynamo's guards find it; ``None`` if it is not."""
    output = _output_graph()
    if output is None:
        return None
    try:
        return eval(source, {"L": output.local_scope, "G": output.global_scope})
    except Exception:
        return None


def is_static_input(node: Node) -> bool:
    """Parameters, buffers, tensors held by modules and ``mark_static_address`` tensors: they come back each call."""
    return bool((node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"))


def is_held(node: Node) -> bool:
    """Whether a placeholder is an attribute of a global object or of ``self``: it is there at the next call, too.

    An attribute of an argument is not: a batch object holds other tensors at each call.
    """
    source = source_name(node)
    return source.startswith(("G[", "L['self']")) and bool(_ATTRIBUTE.search(source))


def comes_back(node: Node) -> bool:
    """Whether an input is the same tensor at each call: it belongs to a module, or to another object that stays."""
    return is_static_input(node) or is_held(node)


@functools.lru_cache(4096)
def dotted_path(source: str) -> str:
    """``L['self']._modules['layers']._modules['0']._parameters['weight']`` → ``layers.0.weight``.

    The root, a local variable of the user's, is dropped: it names nothing that is stable.
    """
    path = _MEMBERS.sub(r".\1", _MODULES.sub(lambda m: "." + (m[1] or m[2]), source))
    path = _ROOT.sub("", path)
    path = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path)
    return path.strip(".")


def argument_name(source: str) -> str:
    """``L['input_ids']`` → ``input_ids``, ``L['batch'].ids`` → ``batch.ids``: what the user calls an input.

    What a ``**kwargs`` of the model's collects has the name that it is given by: ``L['kwargs']['ids']`` → ``ids``.
    """
    path = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", source[1:]).strip(".") if source[:2] == "L[" else ""
    return path.removeprefix("kwargs.")


def module_of(node: Node) -> tuple[str, str]:
    """The path and the class name of the innermost module that a node was traced in; empty outside of modules."""
    stack: Mapping[str, tuple[str, Any]] | None = node.meta.get("nn_module_stack")
    if not stack:
        return "", ""
    path, cls = list(stack.values())[-1]
    return dotted_path(path), cls if isinstance(cls, str) else cls.__name__


def module_classes_of(node: Node) -> tuple[tuple[str, str], ...]:
    """(path, class name) of all modules around a node, outermost first."""
    stack: Mapping[str, tuple[str, Any]] | None = node.meta.get("nn_module_stack")
    return tuple(
        (dotted_path(path), cls if isinstance(cls, str) else cls.__name__) for path, cls in (stack or {}).values()
    )


def user_frame(node: Node) -> tuple[str, int, str] | None:
    """(file, line, text) of the innermost frame outside torch and the compiler that a node was traced from."""
    return _user_frame(node.meta.get("stack_trace") or "")


@functools.lru_cache(1024)
def _user_frame(trace: str) -> tuple[str, int, str] | None:
    # The same text for each layer of a model.
    lines = trace.splitlines()
    found = None
    for index, line in enumerate(lines):
        match = _FRAME.match(line)
        if match and (match["file"].startswith(_MODELS_DIR) or not match["file"].startswith((_TORCH_DIR, OWN_DIR))):
            text = lines[index + 1].strip() if index + 1 < len(lines) else ""
            found = (match["file"], int(match["line"]), "" if _FRAME.match(text) else text)
    return found


def streams_of(node: Node) -> frozenset[int] | None:
    """Which streams and events a node orders, by Dynamo's numbers (0 is the caller's stream); ``None`` if it does not.

    Dynamo leaves ``with torch.cuda.stream(s)`` out of its graph, and keeps what waits or records: as operations of the
    namespace ``streams``, or as methods of an object looked up by number.
    """
    op = node.target
    name = op._qualified_op_name if isinstance(op, torch._ops.OpOverloadPacket) else getattr(op, "namespace", "")
    if isinstance(name, str) and name.partition("::")[0] == "streams":
        return frozenset(arg for arg in node.args if isinstance(arg, int))
    looked_up = [n for n in (node, *node.all_input_nodes) if is_stream_lookup(n)]
    return frozenset(int(n.args[0]) for n in looked_up) if looked_up else None  # type: ignore[arg-type]


def is_stream_lookup(node: Node) -> bool:
    """Whether a node only gets hold of a stream or an event, and orders nothing."""
    return getattr(node.target, "__name__", "") == "get_external_object_by_index"


def is_whole_frame(module: GraphModule) -> bool:
    """Whether the graph holds all of the user's function, as far as Dynamo says: it neither ends at a graph break nor
    resumes after one.
    """
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None:
        return True
    resumed = any("resume_in_" in frame.name for frame in getattr(reason, "user_stack", ()))
    return not reason.graph_break and not resumed


def graph_breaks() -> dict[str, int]:
    """Dynamo's own graph breaks in this process, by reason (first line), with how often each was met."""
    found: dict[str, int] = {}
    for reason, count in torch._dynamo.utils.counters["graph_break"].items():
        first = str(reason).strip().splitlines()[0] if str(reason).strip() else "unknown"
        found[first] = found.get(first, 0) + count
    return found


def recompile_limit_hits() -> int:
    """How often Dynamo gave a function up after too many recompiles and runs it eagerly, without telling a backend."""
    return sum(
        count
        for category in ("graph_break", "unimplemented")
        for reason, count in torch._dynamo.utils.counters[category].items()
        if "recompile limit exceeded" in str(reason) or "cache size limit exceeded" in str(reason)
    )


def unwrapped(fn: Any) -> Any:
    """The module or the plain function behind a compiled callable."""
    while True:
        if isinstance(fn, types.MethodType):
            fn = fn.__self__ if isinstance(fn.__self__, torch.nn.Module) else fn.__func__
        elif isinstance(fn, torch.nn.Module):
            if getattr(fn, "_orig_mod", None) is None:
                return fn
            fn = fn._orig_mod  # of an OptimizedModule
        elif hasattr(fn, "_torchdynamo_orig_callable"):
            fn = fn._torchdynamo_orig_callable
        elif hasattr(fn, "__wrapped__"):  # decorators share one wrapper's code among all that they wrap
            fn = fn.__wrapped__
        else:
            return fn


def code_key(fn: Any) -> types.CodeType | None:
    """The code object that names a compiled callable: Dynamo keeps its entries by code, so instances share it."""
    found = unwrapped(fn)
    while isinstance(found, torch.nn.Module):
        found = unwrapped(type(found).forward)
    return getattr(found, "__code__", None)


def running_owner() -> types.CodeType | None:
    """``code_key`` of the compiled callable that this thread is in, read from the frames of Dynamo's entry wrapper.

    ``None`` where the wrapper is not found (another torch): programs then belong to no callable and are counted in
    ``stats()`` only.
    """
    return code_key(_running_callable())


def running_name() -> str:
    """The name of the compiled callable that this thread is in: the class of a module, or a function; ``""`` where it
    is not found.
    """
    found = unwrapped(_running_callable())
    name = type(found).__qualname__ if isinstance(found, torch.nn.Module) else getattr(found, "__qualname__", "")
    return str(name).rpartition("<locals>.")[2]


def _running_callable() -> Any:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("compile_wrapper", "_fn") and frame.f_code.co_filename.endswith("eval_frame.py"):
            return frame.f_locals.get("fn")
        frame = frame.f_back
    return None


def _output_graph() -> Any:
    """What Dynamo collects of the trace that a backend is called for; ``None`` where it is not found."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "call_user_compiler":
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def drop_guards() -> None:
    """Have Dynamo make no guards for the trace that a backend is called for, where its entry is not called again.

    Those on sizes stay: making them says that a dimension was marked as open which is not.
    """
    context = TracingContext.try_get()
    if context is not None:
        guards = context.guards_context.dynamo_guards
        guards.inner = type(guards.inner)(guard for guard in guards if guard.create_fn_name() == "SHAPE_ENV")


def changed_objects(effects: Any) -> Iterator[tuple[int, Any]]:
    """What was there before a trace and has been changed in it: the ``id()`` of each, and its variable in the trace."""
    for address, variable in effects.id_to_variable.items():
        if type(variable.mutation_type).__name__.endswith("MutationExisting") and effects.is_modified(variable):
            yield address, variable


def lasting_effects() -> list[str]:
    """What Dynamo will do, behind the graph that a backend is called for, to objects that were there before the call:
    attributes set, lists and dictionaries changed. By where the object comes from, or its class.
    """
    effects = getattr(_output_graph(), "side_effects", None)
    if effects is None:
        return []
    ignored = getattr(effects, "ignore_mutation_on_these_variables", ())
    found = []
    for address, variable in changed_objects(effects):
        if variable not in ignored:
            stored = effects.store_attr_mutations.get(variable, {})
            names = [f".{name}" for name, value in stored.items() if not _stays(object_at(address), name, value)]
            if stored and not names:
                continue  # set, and set back
            path = dotted_path(name_of(getattr(variable, "source", None)))
            found += [f"{path or type(object_at(address)).__qualname__}{part}" for part in names or [""]]
    return found


def _stays(owner: Any, name: str, value: Any) -> bool:
    """Whether an attribute already has the value that Dynamo will set it to."""
    try:
        return value.is_python_constant() and getattr(owner, name) is value.as_python_constant()
    except Exception:
        return False
