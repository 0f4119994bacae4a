"""Times of the device from events, with a device that is made up: its clock is another one than the host's."""

from typing import Any

import pytest
import torch

from bcg_compiler.debug import probe as module
from bcg_compiler.debug.probe import Clock, Probe, Taken
from bcg_compiler.debug.steps import Replay
from bcg_compiler.lower import Part

DEVICE = torch.device("cuda:0")


class Machine:
    """A host that reads its clock, and a device that stamps events ``behind`` microseconds later."""

    def __init__(self) -> None:
        self.host_us = 0.0
        self.behind = 5.0

    def now_ns(self) -> int:
        self.host_us += 1
        return int(self.host_us * 1000)

    def event(self, enable_timing: bool) -> Any:
        machine = self

        class Event:
            at = 0.0

            def record(self, stream: Any) -> None:
                machine.host_us += 2
                self.at = 7_000_000 + machine.host_us + machine.behind

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at) / 1000

        return Event()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(module.time, "perf_counter_ns", made.now_ns)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


PARTS = [Part("fill", 0, "x"), Part("segment", 0, "all"), Part("copy_back", 0, "results")]


def replayed(machine: Machine, raises: bool = False) -> Replay:
    clock = Clock()
    clock.set(DEVICE)
    plan: Any = None
    probe = Probe(1, None, 0, PARTS, plan, clock, DEVICE, nvtx=False)
    kept: list[Taken] = []

    def run() -> str:
        probe.mark()
        machine.host_us += 10
        probe.mark()
        machine.host_us += 20
        machine.behind += 100  # the device is busy for longer than the host
        if raises:
            raise ValueError
        probe.mark()
        machine.host_us += 30
        return "result"

    watched = probe.watch(run, lambda _, taken: kept.append(taken))
    if raises:
        with pytest.raises(ValueError):
            watched()
    else:
        assert watched() == "result"
    return probe.read(kept[0])


def test_parts_have_the_time_between_their_events_and_the_host_s_without_them(machine: Machine) -> None:
    replay = replayed(machine)
    host = [step.host_us for step in replay.steps]
    device = [step.device_us or 0.0 for step in replay.steps]
    # A reading takes the host 1 µs and an event 2: between two events there is one of each more than the work.
    assert host == pytest.approx([11, 21, 31])
    assert device == pytest.approx([14, 124, 34])
    assert replay.host_us == pytest.approx(sum(host) + 3 * 3 + 1)
    # What the device is behind at first is not seen: its clock was set with it, before an event as this one.
    assert replay.device_start_us == pytest.approx(replay.start_us + replay.steps[0].start_us - 3)
    assert [s.start_us for s in replay.steps] == sorted(s.start_us for s in replay.steps)


def test_of_a_part_that_raised_the_device_s_time_is_not_known(machine: Machine) -> None:
    replay = replayed(machine, raises=True)
    assert [(step.kind, step.device_us is None) for step in replay.steps] == [("fill", False), ("segment", True)]
