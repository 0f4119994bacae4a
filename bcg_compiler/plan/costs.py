"""What launches cost, and whether a small segment is worth a graph of its own."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Island:
    """A segment beside a break, as far as its cost goes; ``units`` are those of the partition, by ordinal.

    ``edges``   breaks that stand beside it, 1 or 2
    ``taken``   values that must be copied to where its graph reads them, or to the caller, if it is captured
    ``given``   values that must be copied to graphs behind it if it is not
    """

    units: frozenset[int]
    kernels: int
    edges: int = 2
    taken: int = 0
    given: int = 0


@dataclass(frozen=True)
class LaunchCosts:
    """What steps cost beyond the work of their kernels, in µs.

    The defaults are what ``bench/launch_costs.py`` measured on one NVIDIA H200 with torch 2.11 (``docs/bench.md``).
    They are the same on every machine: ranks must agree on a plan, and the hosts of one cluster differ from minute to
    minute. What decides are ratios, which differ less.

    ``graph_us``   of the host: launch a graph
    ``edge_us``    of the device: between the end of a graph and a kernel that is launched behind it, or the other way
    ``op_us``      of the host: one eager operation through ATen
    ``bridge_us``  of the host: copy a value to or from the fixed memory of graphs
    ``break_us``   of the host: one more break step
    """

    graph_us: float = 2.5
    edge_us: float = 1.8
    op_us: float = 7.4
    bridge_us: float = 5.6
    break_us: float = 1.0

    def captured(self, island: Island) -> float:
        """What a captured segment costs. Host and device count alike: which of them a model waits for is not known."""
        return self.graph_us + island.edges * self.edge_us + island.taken * self.bridge_us

    def eager(self, island: Island) -> float:
        """What it costs if its operations join the break beside it."""
        return island.kernels * self.op_us + island.given * self.bridge_us

    def worth_a_graph(self, island: Island) -> bool:
        """Whether capturing costs less. More kernels never speak against it."""
        return self.captured(island) < self.eager(island)

    def why_not(self, island: Island) -> str:
        """The sentence for a plan about a segment that is not worth a graph."""
        return (
            f"a graph costs about {self.captured(island):.1f} µs a call{_copies(island.taken)}, "
            f"its {island.kernels} eager kernel{'s' * (island.kernels != 1)} "
            f"{self.eager(island):.1f} µs{_copies(island.given)}"
        )


def _copies(count: int) -> str:
    return f" with {count} cop{'y' if count == 1 else 'ies'}" if count else ""
