"""What commands take: types, help texts, defaults."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from bcg_compiler.debug.ladders import FORMS

#: The buckets of a run over ranks without ``--ladder``.
DEFAULT_LADDER = "32,64,128,256"

#: How many of the bundled lengths are run where ``--calls`` is not given: under a minute for glm5 on two free cores.
DEFAULT_CALLS = 12


class Dtype(enum.StrEnum):
    """The dtypes that a model can be built in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A zoo name (such as glm5, deepseek_v3, llama), a folder with a Hugging Face config.json, or "
        "package.module:factory.",
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or cuda with a number.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Of the weights.")]
Length = Annotated[int, typer.Option(min=1, help="Prompt length, in tokens.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Number of layers, in place of the model's own.")]
OptionPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help='An option of the backend, e.g. min_segment_kernels=4 or breaks=["module:*.mlp"]; can be repeated.',
    ),
]
ConfigPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--config", metavar="KEY=VALUE", help="A field of the Hugging Face configuration to override; can be repeated."
    ),
]
LadderSpec = Annotated[
    str | None,
    typer.Option(
        "--ladder",
        metavar="SPEC",
        help=f"Pad prompts to these buckets, and leave the number of tokens open: {FORMS}.",
    ),
]
Assume = Annotated[
    bool,
    typer.Option(
        "--assume-rows-independent",
        help="Pad although it is not proven that padding cannot reach live rows: the option of that name.",
    ),
]
LayoutPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--layout",
        metavar="KEY=VALUE",
        help="How a model is laid out over ranks, e.g. cp=4 or attention_does_cp=true; can be repeated.",
    ),
]
LengthsFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Prompt lengths: a CSV with a column ContextTokens or lengths, or one number a line. Default: a bundled "
        "sample of a production trace.",
    ),
]
