"""The weights of a Hugging Face folder (safetensors, one file or several) into a model that was built empty.

A parameter takes the tensor of its own name. A module that holds weights in another form than checkpoints do has a
method ``checkpoint_places``, which gives the names of those tensors, relative to the module, and their places. They
stand for all parameters that the module holds itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bcg_compiler.models.layers.errors import ModelError

#: What may be converted to the type of a parameter. Quantised weights may not: they mean nothing without their scales.
_PLAIN = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class Place:
    """Where one tensor of a checkpoint goes: its shape there, and the function that puts it into the model.

    Without a function it goes nowhere: another rank holds it, and only its name is looked at.
    """

    shape: tuple[int, ...]
    put: Callable[[torch.Tensor], object] | None


def load_weights(model: nn.Module, folder: Path, ignored: Callable[[str], bool] = lambda name: False) -> None:
    """Fill all parameters of ``model`` from the safetensors files of ``folder``.

    ``ignored`` says of a tensor's name whether it is none of the model's, such as a layer for speculative decoding.

    Raises:
        ModelError: tensors are missing, left over, or of another shape or type; all of them are named.
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as error:
        raise ImportError('weights need safetensors: pip install "bcg-compiler[models]"') from error

    places = places_of(model)
    files = _files(folder)
    found: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            found.update((name, path) for name in opened.keys() if not ignored(name))  # noqa: SIM118 (no mapping)
    wrong = [f"missing: {name}" for name in places if name not in found]
    wrong += [f"of no use: {name}" for name in found if name not in places]
    if not wrong:
        for path in files:
            with safe_open(path, framework="pt") as opened:
                for name in (name for name, where in found.items() if where == path and places[name].put):
                    wrong += _put(name, places[name], opened.get_tensor(name))
    if wrong:
        raise ModelError(f"The checkpoint {folder.name} does not fit its configuration:{_listed(wrong)}")


def places_of(model: nn.Module) -> dict[str, Place]:
    """The name of each tensor that a checkpoint of ``model`` must hold, and its place."""
    places: dict[str, Place] = {}
    seen: set[int] = set()  # a parameter that is tied to an earlier one has no tensor of its own
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own: Mapping[str, Place]
        if hasattr(module, "checkpoint_places"):
            own = module.checkpoint_places()
        else:
            found = [(n, p) for n, p in module.named_parameters(recurse=False) if id(p) not in seen]
            own = {name: Place(tuple(parameter.shape), parameter.copy_) for name, parameter in found}
            seen.update(id(parameter) for _, parameter in found)
        places |= {prefix + name: place for name, place in own.items()}
    return places


def _put(name: str, place: Place, tensor: torch.Tensor) -> Iterable[str]:
    if tuple(tensor.shape) != place.shape:
        yield f"of another shape: {name} is {list(tensor.shape)} and not {list(place.shape)}"
    elif tensor.dtype not in _PLAIN:
        yield f"of another type: {name} is {str(tensor.dtype).removeprefix('torch.')}, which is not loaded"
    elif place.put is not None:
        with torch.no_grad():
            place.put(tensor)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise ModelError(f"{folder} lacks files that its index names: {', '.join(absent)}")
        return [folder / name for name in names]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    raise ModelError(f"{folder} has no weights: there is no *.safetensors in it")


def _listed(lines: list[str], most: int = 20) -> str:
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "".join(f"\n  {line}" for line in [*lines[:most], *more])
