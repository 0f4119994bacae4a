"""What must be the same on all ranks, compared once, at set-up."""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from bcg_compiler.distributed.exchange import Exchange, rank_names
from bcg_compiler.errors import RankError

#: The length of a sha256.
DIGEST = 32


def agree(exchange: Exchange, config: Mapping[str, str]) -> None:
    """Return if ``config`` is the same on all ranks; else raise the same ``RankError`` on each of them.

    The error names what differs, and which ranks have what. Two all-gathers where all is well.
    """
    text = json.dumps(dict(config), sort_keys=True).encode()
    digests = exchange.gather(_bytes(hashlib.sha256(text).digest()))
    lengths = exchange.gather(torch.tensor([len(text)]))
    if (digests == digests[0]).all():
        return
    # A tensor of one shape on all ranks: longer ones are met with spaces, which JSON allows at the end.
    texts = exchange.gather(_bytes(text.ljust(int(lengths.max()))))
    raise RankError(_differences([json.loads(bytes(one.tolist())) for one in texts], exchange.ranks))


def versions() -> dict[str, str]:
    """Of this package, torch and Python."""
    try:
        ours = version("bcg-compiler")
    except PackageNotFoundError:
        ours = "not installed as a package"
    return {"bcg_compiler": ours, "torch": torch.__version__, "python": platform.python_version()}


def _bytes(text: bytes) -> torch.Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)


def _differences(configs: Sequence[Mapping[str, str]], names: Sequence[int]) -> str:
    lines = []
    for key in sorted({key for config in configs for key in config}):
        by_value: dict[str, list[int]] = {}
        for name, config in zip(names, configs, strict=True):
            by_value.setdefault(config.get(key, "nothing"), []).append(name)
        if len(by_value) > 1:
            told = "; ".join(f"{value} on {rank_names(ranks)}" for value, ranks in by_value.items())
            lines.append(f"\n  {key}: {told}")
    return (
        f"Ranks {', '.join(map(str, names))} do not agree on what must be the same on all of them. Start them with the "
        f"same options, versions and model.{''.join(lines)}"
    )
