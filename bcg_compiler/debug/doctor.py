"""What is installed, which kernels the serving models use, and what is slower or off because of it."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bcg_compiler.debug import screen
from bcg_compiler.debug.words import count
from bcg_compiler.distributed.rules import PARALLEL_RULES, Parallel, evaluate
from bcg_compiler.models.layers import kernels
from bcg_compiler.plan import Plan

#: Distributions that are of use here, and what each is for.
LIBRARIES = {
    "triton": "kernels: filled slots, index logits, segments by Inductor",
    "flashinfer-python": "attention of the serving models",
    "transformers": "the zoo, and models by name",
    "safetensors": "weights of a folder",
    "deep_ep": "expert parallelism between GPUs",
    "matplotlib": "pictures of ladders and benchmarks",
}

#: Where the operations of the serving models are defined: how a plan names them.
_LAYERS = kernels.__name__.rpartition(".")[0] + "."


@dataclass(frozen=True)
class Health:
    """What ``bcg doctor`` found on this machine.

    Attributes:
        versions: of Python, torch, CUDA and this package.
        devices: the CUDA devices that torch sees.
        libraries: name → version; "" if it is not installed.
        kernels: operation → implementation, best first → why it is not in use; "" for those that are there.
        notes: what is slower or off, and what would change it.
    """

    versions: Mapping[str, str]
    devices: tuple[str, ...]
    libraries: Mapping[str, str]
    kernels: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...]


def examine() -> Health:
    """Look at this process and its machine. Nothing is run on a device."""
    has_cuda = torch.cuda.is_available()
    found = {name: _version(name) for name in LIBRARIES}
    choices = kernels.choices("cuda" if has_cuda else "cpu")
    notes = []
    if not has_cuda:
        built = "built for it, and finds no device" if torch.version.cuda else "a build without it"
        notes.append(f"No CUDA (torch is {built}): captures are emulated. They show faults, and save no time.")
    elif not found["triton"]:
        notes.append("Without Triton slots are filled one by one, and segments cannot be compiled by Inductor.")
    for operation, by_name in choices.items():
        for name, why in by_name.items():
            if not why:
                break
            notes.append(f"{operation} does without {name}: {why}.")
    versions = {
        "bcg_compiler": _version("bcg-compiler") or "not installed as a package",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
    }
    return Health(versions, _devices() if has_cuda else (), found, choices, tuple(notes))


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _devices() -> tuple[str, ...]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        size = f"{properties.total_memory / 2**30:.0f} GiB"
        found.append(f"{properties.name}, {size}, compute capability {properties.major}.{properties.minor}")
    return tuple(found)


def health_view(health: Health) -> Group:
    """For a terminal."""
    lines = dict(health.versions)
    lines |= {f"cuda:{index}": text for index, text in enumerate(health.devices)}
    libraries = Table("library", "version", "for", box=None, pad_edge=False, header_style="bold")
    for name, found in health.libraries.items():
        libraries.add_row(name, found or "—", LIBRARIES[name])
    used = Table("operation", "kernel in use", box=None, pad_edge=False, header_style="bold")
    for operation, by_name in health.kernels.items():
        used.add_row(operation, next(name for name, why in by_name.items() if not why))
    notes = Text("\n".join(health.notes) or "Nothing is slower or off.")
    return Group(screen.header(**lines), "", libraries, "", used, "", notes)


def layout_view(layout: Parallel) -> Group:
    """A layout of ranks, its digest, and which rules it breaks, for a terminal."""
    told = [f"{f.name} {getattr(layout, f.name)}" for f in fields(layout) if getattr(layout, f.name) != f.default]
    broken = evaluate(layout)
    if not broken:
        said = Text(f"None of the {count(len(PARALLEL_RULES), 'rule')} for ranks speaks against replay.")
        return Group(screen.header(ranks=", ".join(told) or "one", digest=layout.digest()), "", said)
    rules = Table("reason", "what was seen, and what to do", box=None, pad_edge=False, header_style="bold")
    for rule in broken:
        rules.add_row(rule.code, Text(str(rule)))
    said = Text("Nothing is replayed: all ranks run eagerly.", style="bold")
    return Group(screen.header(ranks=", ".join(told), digest=layout.digest()), "", rules, "", said)


def kernels_line(plans: tuple[Plan | None, ...], device: torch.device) -> str:
    """What the operations of serving models in these plans would use on a device; "" if there are none."""
    named = [reason.op for plan in plans if plan for step in plan.breaks for reason in step.reasons]
    named += [hoisted.name for plan in plans if plan for hoisted in plan.hoisted]
    if not any(name.startswith(_LAYERS) for name in named):
        return ""
    return ", ".join(f"{operation}: {name}" for operation, name in kernels.in_use(device).items())
