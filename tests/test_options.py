"""Options: documented, checked, and with the nearest name when wrong."""

from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import bcg_compiler as bcg
from bcg_compiler.errors import OptionError
from bcg_compiler.options import Options, names


def test_every_option_is_documented() -> None:
    with open("docs/options.md") as page:
        text = page.read()
    assert [name for name in names() if f"`{name}`" not in text] == []


def test_no_options_are_the_defaults() -> None:
    assert Options.parse(None) == Options.parse({}) == Options()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"captur": "off"}, "Unknown option 'captur'. Did you mean 'capture'"),
        ({"ladder": [8, 4]}, r"Option 'ladder' is \[8, 4\]: buckets\[1\] is 4, behind 8"),
        ({"ladder": 64}, "it must be a list of ints"),
        ({"token_dim": 1.5}, "it must be a dimension, or 'name:dimension' of an input"),
        ({"token_dim": "input_ids"}, "write the name of an input, a colon, and a dimension"),
        ({"bucket_multiple": 0}, "must be at least 1"),
        ({"max_padding_factor": 0.5}, "must be at least 1: no padding at all"),
        ({"slots": ["x"]}, "a dictionary from names of inputs to policies"),
        ({"slots": {"x": "none"}}, "gives 'none' for 'x'; it must be 'zero', 'keep', 'once', or a number"),
        ({"limits": {}}, "it must be a bcg_compiler.Limits"),
        ({"on_late_capture": "raise"}, "must be one of 'capture', 'eager', 'error'"),
        ({"outputs": "view"}, "must be one of 'copy', 'alias'"),
        ({"capture": "on"}, "must be one of 'auto', 'cuda', 'emulated', 'off'"),
        ({"min_segment_kernels": "3"}, r"'3' \(str\); it must be an integer, or 'auto'"),
        ({"min_segment_kernels": True}, r"True \(bool\); it must be an integer"),
        ({"min_segment_kernels": -1}, "must not be negative"),
        ({"capturable": 3}, r"3 \(int\); it must be a list"),
        ({"capturable": [3]}, "it must be a list of strings"),
        ({"capturable": [len]}, "it must be a list of strings"),
        ({"breaks": [3]}, "a list of strings and predicates"),
    ],
)
def test_a_wrong_option_says_what_was_seen_and_what_is_wanted(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Options.parse(given)


def test_one_rule_needs_no_list() -> None:
    assert Options.parse({"breaks": "op:aten::mm"}).breaks == ("op:aten::mm",)
    assert Options.parse({"breaks": len}).breaks == (len,)


@pytest.mark.parametrize("kept", [False, True])
def test_what_torch_takes_for_itself_is_no_unknown_option(kept: bool) -> None:
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
    assert Options.parse(options if kept else {}) == Options()


def test_what_keyword_arguments_collect_is_called_as_the_user_calls_it() -> None:
    """The inputs of transformers' models were named ``kwargs.input_ids``, which nobody would write in an option."""
    torch.compiler.reset()

    def model(**kwargs: torch.Tensor) -> torch.Tensor:
        return (kwargs["ids"] * 2 + kwargs["weights"]).sin()

    options = {"ladder": [8], "token_dim": "ids:1", "slots": {"weights": 1.0}, "min_segment_kernels": 1}
    compiled = torch.compile(model, backend="bcg", options=options)
    ids, weights = torch.ones(1, 5), torch.ones(1, 5)
    torch._dynamo.mark_dynamic(ids, 1)
    torch._dynamo.mark_dynamic(weights, 1)
    compiled(ids=ids, weights=weights)
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None and program.plan.padding is not None
    assert {value.argument for value in program.plan.values if value.kind == "input"} == {"ids", "weights"}


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
def test_modes_that_mean_our_default(mode: str | None) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x + 1, backend="bcg", mode=mode)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


def test_other_modes_are_refused() -> None:
    torch.compiler.reset()
    with pytest.raises(BackendCompilerFailed, match="mode='max-autotune' is not a mode of the bcg backend"):
        torch.compile(lambda x: x + 1, backend="bcg", mode="max-autotune")(torch.ones(2))


def test_capture_of_cuda_graphs_is_refused_for_a_graph_on_the_cpu() -> None:
    """The first call worked, and the second one failed in ``torch.cuda`` with no word of the option."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x.sin() + 1, backend="bcg", options={"capture": "cuda"})
    with pytest.raises(BackendCompilerFailed, match="Option 'capture' is \"cuda\", but the graph computes on cpu"):
        compiled(torch.ones(2))
