"""The stack of functorch's transforms: how deep it is, and leaving those that a graph has left open."""

from torch._C import _functorch

# One by one: `pop_dynamic_layer_stack_and_undo_to_depth` of torch 2.11.0 stops at a wrong depth.
_LEAVE = {
    _functorch.TransformType.Vmap: _functorch._vmap_decrement_nesting,
    _functorch.TransformType.Grad: _functorch._grad_decrement_nesting,
    _functorch.TransformType.Jvp: _functorch._jvp_decrement_nesting,
    _functorch.TransformType.Functionalize: _functorch._func_decrement_nesting,
}


def transform_depth() -> int:
    """How many transforms this thread is in."""
    return int(_functorch.get_dynamic_layer_stack_depth())


def leave_transforms(depth: int) -> None:
    """Leave the innermost transforms until ``depth`` of them are left."""
    while transform_depth() > depth:
        _LEAVE[_functorch.peek_interpreter_stack().key()]()
