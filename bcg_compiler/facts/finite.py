"""Whether padded rows stay finite in what is computed of them: 0 times a row that is not is not 0.

Padded rows of inputs hold zeros, or another finite number. What is computed of finite numbers is taken to be finite
(overflow aside), but for operations that need more than that: a logarithm, a division, a softmax over nothing. What
these need is followed in the simplest form: a sum of squares and a positive constant is positive.
"""

from collections.abc import Sequence
from typing import Any

import torch

from bcg_compiler.compat.fake import tree_leaves
from bcg_compiler.compat.recorder import Recorded

#: Finite for positive arguments only.
_OF_POSITIVE = frozenset({"reciprocal", "rsqrt", "log", "log2", "log10", "log1p", "sqrt"})
#: Not finite for many finite arguments.
_WILD_NAMES = "exp exp2 expm1 sinh cosh tan acos asin atanh acosh cumprod prod logcumsumexp lgamma digamma"
_WILD = frozenset(_WILD_NAMES.split())
_DIVIDES = frozenset({"div", "divide", "true_divide", "floor_divide", "fmod", "remainder"})
_NOT_NEGATIVE_NAMES = "abs square relu sigmoid softplus _softmax _safe_softmax norm linalg_vector_norm exp"
_NOT_NEGATIVE = frozenset(_NOT_NEGATIVE_NAMES.split())
#: What is not negative, or positive, stays so.
_KEEPS_NAMES = (
    "_to_copy clone mean sum amax amin view _unsafe_view reshape unsqueeze squeeze expand permute transpose slice "
    "select alias detach contiguous t cumsum sqrt"
)
_KEEPS = frozenset(_KEEPS_NAMES.split())
#: They put a value where a mask says so.
_FILLS = frozenset({"masked_fill", "where"})


class Finite:
    """Follows recorded operations. ``why`` a tensor's padded rows may not be finite; ``""`` if they are."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self._why: dict[int, str] = {}
        self._of_data = {id(tensor) for tensor in given}
        self._not_negative: set[int] = set()
        self._positive: set[int] = set()

    def why(self, tensor: torch.Tensor) -> str:
        """Why the padded rows of a value may not be finite."""
        return self._why.get(id(tensor), "")

    def see(self, call: Recorded, results: Sequence[torch.Tensor]) -> None:
        """An operation has been recorded, and ``results`` are what it made or wrote."""
        name = call.op._schema.name.partition("::")[2].removesuffix("_") if hasattr(call.op, "_schema") else ""
        read = [t for t in (*call.reads, *tree_leaves((call.args, call.kwargs))) if isinstance(t, torch.Tensor)]
        why = next((w for t in read if (w := self.why(t))), "") or self._begins(name, call, read)
        for tensor in results:
            key = id(tensor)
            if why:
                self._why[key] = why
            if any(id(t) in self._of_data for t in read):
                self._of_data.add(key)
            self._sign(name, call, read, key)

    def _begins(self, name: str, call: Recorded, read: Sequence[torch.Tensor]) -> str:
        """Why this operation makes of finite numbers what is not."""
        if name in _WILD:
            return name
        if _sees_other_bits(call):
            return "a view as another type"
        if name in _OF_POSITIVE and not all(id(t) in self._positive for t in read):
            # The square root of 0 is 0.
            return "" if name == "sqrt" and all(id(t) in self._not_negative for t in read) else name
        if name in _DIVIDES:
            divisor = call.args[1] if len(call.args) > 1 else call.kwargs.get("other")
            if isinstance(divisor, torch.Tensor) and id(divisor) in self._of_data and id(divisor) not in self._positive:
                return f"a division ({name})"
        if name == "pow":
            exponent = call.args[1] if len(call.args) > 1 else None
            whole = isinstance(exponent, (int, float)) and float(exponent).is_integer() and exponent >= 0
            if not whole and not (isinstance(call.args[0], torch.Tensor) and id(call.args[0]) in self._positive):
                return name
        mask = read[0] if name == "where" and read else call.args[1] if name == "masked_fill" else None
        if name in _FILLS and isinstance(mask, torch.Tensor) and id(mask) in self._of_data and self._fills_inf(call):
            return "-inf by a mask that is given, which may leave a row without anything"
        if "attention" in name and any(id(t) in self._of_data for t in _masks(call)):
            return "attention by a mask that is given, which may leave a query without any key"
        return ""

    def _fills_inf(self, call: Recorded) -> bool:
        numbers = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, float)]
        tensors = [t for t in tree_leaves(call.args) if isinstance(t, torch.Tensor) and t.dim() == 0]
        return any(number in (float("inf"), float("-inf")) for number in numbers) or bool(tensors)

    def _sign(self, name: str, call: Recorded, read: Sequence[torch.Tensor], key: int) -> None:
        if _sees_other_bits(call):
            return
        args = call.args
        was_positive = bool(read) and id(read[0]) in self._positive
        was_not_negative = was_positive or (bool(read) and id(read[0]) in self._not_negative)
        squares = name == "mul" and len(args) > 1 and args[0] is args[1]
        evenly = name == "pow" and len(args) > 1 and isinstance(args[1], (int, float)) and args[1] % 2 == 0
        if name in _NOT_NEGATIVE or squares or evenly or (name in _KEEPS and was_not_negative):
            self._not_negative.add(key)
        lifted = name == "add" and was_not_negative and _positive_number(args[1:2])
        clamped = name in ("clamp_min", "clamp") and _positive_number(args[1:2])
        kept = was_positive and (name == "rsqrt" or (name in _KEEPS and name != "cumsum"))
        if lifted or clamped or kept:
            self._positive.add(key)


def _sees_other_bits(call: Recorded) -> bool:
    """Whether it views memory as numbers of another type: finite ones may then be anything."""
    return getattr(call.op, "_schema", None) is not None and call.op == torch.ops.aten.view.dtype


def _positive_number(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], (int, float)) and args[0] > 0


def _masks(call: Recorded) -> list[torch.Tensor]:
    names = [argument.name for argument in call.op._schema.arguments]
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    return [v for n, v in given.items() if n in ("attn_mask", "attn_bias") and isinstance(v, torch.Tensor)]
