"""Runs with a ladder: texts that mean one, what the number of tokens is, what the report counts, and tolerates."""

from collections.abc import Callable

import pytest
import torch

import bcg_compiler as bcg
from bcg_compiler.debug.ladders import read_ladder
from bcg_compiler.debug.run import compare_with_eager
from bcg_compiler.debug.tokens import token_dims, tokens_of
from bcg_compiler.errors import LadderError
from bcg_compiler.models.zoo import ZooModel, build

LENGTHS = [3, 5, 5, 9, 30]


@pytest.mark.parametrize(
    ("text", "ladder"),
    [
        ("from-lengths:2", bcg.Ladder.from_lengths(LENGTHS, 2)),
        ("from-lengths:2:16", bcg.Ladder.from_lengths(LENGTHS, 2, ceiling=16)),
        ("default:2048", bcg.Ladder.default(2048)),
        ("relative:2048:0.1", bcg.Ladder.relative(2048, 0.1)),
        ("64,128,256", bcg.Ladder([64, 128, 256])),
        ("64", bcg.Ladder([64])),
    ],
)
def test_texts_that_mean_a_ladder(text: str, ladder: bcg.Ladder) -> None:
    assert read_ladder(text, LENGTHS) == ladder


@pytest.mark.parametrize(
    "text", ["", "default", "default:", "from-lengths:two", "relative:2048:0.1:4", "64,", "64;128"]
)
def test_other_texts_are_answered_with_the_possible_forms(text: str) -> None:
    with pytest.raises(LadderError) as error:
        read_ladder(text, LENGTHS)
    assert repr(text) in str(error.value)
    for form in ("from-lengths:16", "default:2048", "relative:2048:0.1", "64,128,256"):
        assert form in str(error.value)


def test_the_number_of_tokens_is_what_differs_between_prompts() -> None:
    pytest.importorskip("transformers")
    dims = {name: dict(token_dims(build(name, layers=1).make_inputs)) for name in ("llama", "t5", "whisper", "vit")}
    assert dims == {
        "llama": {"input_ids": 1},
        "t5": {"input_ids": 1, "decoder_input_ids": 1},
        "whisper": {"decoder_input_ids": 1},
        "vit": {},
    }
    assert tokens_of(build("bert", layers=1).make_inputs, [7, 600]) == [7, 512]
    assert tokens_of(build("vit", layers=1).make_inputs, [7, 600]) == [7, 600]


class Causal(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.cumsum(1) * 2).sin() + x


def make_inputs(length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"x": torch.rand(1, length, 4, generator=generator)}


def test_padded_tokens_are_counted_once_for_each_call_that_replays() -> None:
    bcg.reset()
    built = ZooModel(Causal(), make_inputs, "causal")
    options = {"ladder": [8, 16], "max_padding_factor": 1.5}
    report = compare_with_eager(built, [5, 6, 7, 9, 12, 17], options=options, timed=False)
    assert report.equal and report.largest == 0 and report.close == 0
    # 5 runs eagerly as the first call, 9 because 16 is too much padding, 17 because it is too long.
    assert (report.live, report.padded) == (6 + 7 + 12, 2 + 1 + 4)
    assert report.eager_runs() == {"warm_up": 1, "padding": 1, "too_long": 1}
    (ran,) = report.ran
    assert (ran.captures, ran.replays) == (2, 3)
    assert ran.forecast > 0 and ran.measured > 0


@pytest.mark.parametrize(("off", "equal"), [(0.0, True), (1e-7, True), (1e-2, False)])
def test_where_segments_are_compiled_so_much_is_tolerated_as_the_dtype_rounds(off: float, equal: bool) -> None:
    """Each call was said to differ, although segments ran the same kernels as eager, which they did not."""
    bcg.reset()

    def compiler(module: torch.fx.GraphModule, _: object) -> Callable[..., tuple[torch.Tensor, ...]]:
        return lambda *args: tuple(result + off for result in module(*args))

    built = ZooModel(Causal(), make_inputs, "causal")
    options = {"segment_compiler": compiler, "capture": "emulated"}
    report = compare_with_eager(built, [5, 6], options=options, timed=False)
    assert report.tolerant and report.equal is equal
    exact = compare_with_eager(built, [5, 6], options={"capture": "emulated"}, timed=False)
    assert exact.equal and not exact.tolerant
