"""Options: documented, checked, and with the nearest name when wrong."""

from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

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
        ({"ladder": [4]}, "Unknown option 'ladder'."),
        ({"capture": "on"}, "must be one of 'auto', 'cuda', 'emulated', 'off'"),
        ({"min_segment_kernels": "3"}, r"'3' \(str\); it must be an integer"),
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
