"""A model with two segments, a break between them and a padded length; as a script it calls it and dumps to argv[1]."""

import sys
from typing import Any

import torch
from torch import Tensor

import bcg_compiler as bcg


@bcg.eager_break(fake=torch.empty_like, reads_live_rows=True)
def double(x: Tensor) -> Tensor:
    return x * 2


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # entered by a function without a public name
            h = self.inner(x).relu()
        h = double(h)
        return torch.nn.functional.softmax(h * self.table, -1, dtype=torch.float32).sin()


#: Options by which the segments of ``Small`` stay apart, and are padded.
OPTIONS: dict[str, Any] = {"capture": "emulated", "min_segment_kernels": 1, "ladder": [4, 8]}


def run(lengths: tuple[int, ...] = (3, 3, 7, 7), **options: Any) -> Any:
    """Compile ``Small`` anew, call it and compare with eager; return what was compiled."""
    bcg.reset()
    torch.manual_seed(0)
    model = Small()
    compiled = torch.compile(model, backend="bcg", options=OPTIONS | options)
    with torch.no_grad():
        for length in lengths:
            x = torch.randn(length, 4)
            torch._dynamo.mark_dynamic(x, 0)
            assert torch.equal(compiled(x), model(x))
    return compiled


if __name__ == "__main__":
    run(dump=sys.argv[1])
