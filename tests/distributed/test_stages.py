"""The layers of pipeline stages: each is in one stage, and what is not so is refused by the name of the stage."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcg_compiler.distributed.pipeline import Stage, check_stages
from bcg_compiler.errors import PipelineError

counts = st.tuples(st.integers(0, 100), st.integers(1, 12))


@settings(deadline=None)
@given(counts)
def test_even_stages_have_each_layer_once_and_differ_by_one_at_most(sizes: tuple[int, int]) -> None:
    layers, count = sizes
    stages = check_stages([Stage.even(layers, count, i) for i in range(count)])
    assert [i for stage in stages for i in range(stage.start, stage.end)] == list(range(layers))
    lengths = [stage.end - stage.start for stage in stages]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)
    assert [stage.is_first for stage in stages].count(True) == [stage.is_last for stage in stages].count(True) == 1


@st.composite
def nearly_sound(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Some number of layers, and ranges that have each of them once, but for an end of one of them, perhaps."""
    layers = draw(st.integers(0, 6))
    cuts = [0, *sorted(draw(st.lists(st.integers(0, layers), max_size=3))), layers]
    ends = [end for bound in pairwise(cuts) for end in bound]
    ends[draw(st.integers(0, len(ends) - 1))] += draw(st.sampled_from([0, -1, 1, 2]))
    return layers, list(zip(ends[::2], ends[1::2], strict=True))


@settings(deadline=None)
@given(nearly_sound())
def test_ranges_are_taken_if_and_only_if_each_layer_is_in_one_of_them_in_order(
    drawn: tuple[int, list[tuple[int, int]]],
) -> None:
    layers, bounds = drawn
    each_once = [i for start, end in bounds for i in range(start, end)] == list(range(layers))
    # An empty stage, too, stands where those beside it end and begin.
    ends = [0, *(end for bound in bounds for end in bound), layers]
    sound = each_once and ends == sorted(ends)
    try:
        stages = [Stage.of(layers, len(bounds), i, start=start, end=end) for i, (start, end) in enumerate(bounds)]
        check_stages(stages[::-1])
    except PipelineError as error:
        assert not sound and "Stage" in str(error)
    else:
        assert sound


@settings(deadline=None)
@given(counts.filter(lambda sizes: sizes[0] > 0))
def test_what_goes_with_the_layers_stands_at_their_global_index(sizes: tuple[int, int]) -> None:
    layers, count = sizes
    stages = [Stage.even(layers, count, i) for i in range(count)]
    lists = [stage.place(lambda i: f"layer {i}") for stage in stages]
    assert all(len(placed) == layers for placed in lists)
    for i, column in enumerate(zip(*lists, strict=True)):
        assert [value for value in column if value is not None] == [f"layer {i}"]


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        (dict(start=1), "Stage 1 of 3 is given start and no end"),
        (dict(end=1), "Stage 1 of 3 is given end and no start"),
        (dict(start=3, end=2), r"Stage 1 of 3 \(start 3, end 2\) runs over: .* 6 layers"),
        (dict(start=3, end=7), "Stage 1 of 3 .* runs over"),
        (dict(start=-1, end=2), "Stage 1 of 3 .* runs over"),
        (dict(index=3), "no stage 3 of 3"),
        (dict(index=-1), "no stage -1 of 3"),
        (dict(index=0, start=1, end=2), "Stage 0 of 3 .* the first one and leaves out layers 0 to 0"),
        (dict(index=2, start=1, end=4), "Stage 2 of 3 .* the last one and leaves out layers 4 to 5"),
        (dict(stages=0), "6 layers cannot be shared out over 0 stages"),
    ],
)
def test_a_stage_that_cannot_be_is_refused(bounds: dict[str, Any], says: str) -> None:
    with pytest.raises(PipelineError, match=says):
        Stage.of(**{"layers": 6, "stages": 3, "index": 1, **bounds})


def stage(index: int, start: int, end: int, layers: int = 6, stages: int = 3) -> Stage:
    return Stage(start=start, end=end, layers=layers, index=index, stages=stages)


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([], "There is no stage"),
        ([stage(0, 0, 2), stage(1, 1, 4), stage(2, 4, 6)], r"Stage 1 of 3 \(start 1, end 4\) begins within Stage 0"),
        ([stage(0, 0, 2), stage(1, 3, 4), stage(2, 4, 6)], "Stage 1 of 3 .* leaves out layers 2 to 2, behind Stage 0"),
        ([stage(0, 0, 2), stage(1, 2, 4), stage(1, 4, 6)], "Stage 1 of 3 .* and Stage 1 of 3 .* of which there can be"),
        ([stage(0, 0, 2), stage(2, 2, 6)], "one of 3, and there are 2 stages"),
        ([stage(0, 0, 3), stage(1, 3, 5, layers=5), stage(2, 5, 6)], "Stage 1 of 3 .* of 5 layers .* of 6 layers"),
    ],
)
def test_stages_that_do_not_make_up_a_model_are_refused(stages: list[Stage], says: str) -> None:
    with pytest.raises(PipelineError, match=says):
        check_stages(stages)
