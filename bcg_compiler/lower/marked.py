"""The replay function of a capture once more, with a call between its parts."""

from collections.abc import Callable
from dataclasses import replace

from bcg_compiler.lower.writer import Code


def marked(code: Code, mark: Callable[[], None], filename: str) -> Code:
    """The text of ``code``, compiled once more as ``filename``, with a call of ``mark`` before each of its parts.

    It calls the same objects: the same graphs, buffers and bodies. ``code`` stays as it is.
    """
    replay = code.made
    # Only what the text refers to is in its closure, and the copy must keep nothing else alive.
    cells = zip(replay.__code__.co_freevars, replay.__closure__ or (), strict=True)
    objects = {name: cell.cell_contents for name, cell in cells}
    _, *body = code.source.split("\n")
    text = [f"def make({', '.join(['mark', *objects])}):"]
    numbers = {}
    for number, line in enumerate(body, start=2):
        if number in code.parts:
            text.append(f"{line[: len(line) - len(line.lstrip())]}mark()")
        text.append(line)
        numbers[number] = len(text)
    source = "\n".join(text)
    scope: dict[str, Callable[..., Callable[..., object]]] = {}
    exec(compile(source, filename, "exec"), scope)
    return replace(
        code,
        made=scope["make"](mark, **objects),
        source=source,
        filename=filename,
        lines={numbers[number]: what for number, what in code.lines.items()},
        parts={numbers[number]: part for number, part in code.parts.items()},
    )
