"""What a second stream gains: shared experts beside routed ones, in one graph, on one stream and on two.

Run with ``python bench/dual_stream.py`` on a machine with a CUDA device. Prints microseconds a call, median of 50.
"""

import argparse
import statistics

import torch
from torch import Tensor, nn

import bcg_compiler as bcg


class Layer(nn.Module):
    """Two feed-forward nets of one input, ``[tokens, hidden]``, the first on a side stream."""

    def __init__(self, hidden: int, side: torch.cuda.Stream) -> None:
        super().__init__()
        self.shared, self.routed = (
            nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden)) for _ in range(2)
        )
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            shared = self.shared(x)
        routed = self.routed(x)
        current.wait_stream(self.side)
        return (shared + routed).tanh()


def microseconds(run: nn.Module, x: Tensor) -> float:
    """The median time of a call from synchronisation to synchronisation."""
    found = []
    for call in range(60):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run(x)
        end.record()
        torch.cuda.synchronize()
        if call >= 10:
            found.append(start.elapsed_time(end) * 1e3)
    return statistics.median(found)


def main() -> None:
    """Print one line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, nargs="*", default=[16, 256, 2048])
    parser.add_argument("--compiler", default="eager", help="of segments; those with two streams are not compiled")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    side = torch.cuda.Stream()
    with torch.device("cuda"):
        model = nn.Sequential(*(Layer(given.hidden, side) for _ in range(given.layers))).bfloat16()
    with torch.inference_mode():
        for tokens in given.tokens:
            x = torch.randn(tokens, given.hidden, device="cuda", dtype=torch.bfloat16)
            times = {"eager": microseconds(model, x)}
            for dual in (False, True):
                bcg.reset()
                compiled = torch.compile(
                    model, backend="bcg", options={"dual_stream": dual, "segment_compiler": given.compiler}
                )
                times["two streams" if dual else "one stream"] = microseconds(compiled, x)
            print(f"{tokens:6} tokens  " + "  ".join(f"{name} {us:8.1f} µs" for name, us in times.items()))


if __name__ == "__main__":
    main()
