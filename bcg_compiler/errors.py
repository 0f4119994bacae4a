"""Every error that bcg_compiler raises on purpose. Each message says what was seen, where, and what to do."""

import difflib
from collections.abc import Iterable


class BcgError(Exception):
    """Base of all errors of this package."""

    #: Whether the message says which operation it is about: then nobody adds a note of where it was raised.
    says_where = False


class OptionError(BcgError, ValueError):
    """An option that does not exist, has a wrong type, or an unusable value."""


class LadderError(BcgError, ValueError):
    """Buckets, lengths or bounds from which no ladder can be made."""


class AdmissionError(BcgError, ValueError):
    """A batch or limits that cannot be: what admission is asked about is checked when it is made."""


class ParallelError(BcgError, ValueError):
    """A layout over ranks that cannot be, or rows that are not those of the layout."""


class PipelineError(BcgError, ValueError):
    """Pipeline stages that do not make up a model, or a proxy between two of them that is not what they agreed on."""


class RuleError(BcgError, ValueError):
    """A break rule that is malformed, names an unknown op, or matches nothing."""


class BreakArgumentError(BcgError, TypeError):
    """A break function was given (or returned) something that a program cannot hold on to."""


class BreakGradError(BcgError, RuntimeError):
    """A break function was called under grad mode with a tensor that requires grad."""


class BreakMutationError(BcgError, RuntimeError):
    """A break function wrote into an argument that it does not declare in ``mutates_args``."""


class BreakResultError(BcgError, RuntimeError):
    """A break returned something of another shape, dtype or device than when its program was captured."""


class SegmentError(BcgError, RuntimeError):
    """A segment could not be captured; the cause says why. Never reaches the user: the node becomes a break."""

    def __init__(self, step: int, given: tuple[object, ...]) -> None:
        super().__init__(f"Segment {step} could not be captured.")
        self.step = step
        self.given = given


class ContextError(BcgError, LookupError):
    """The forward context, or a field of it, was read where none is set."""


class AotError(BcgError, ValueError):
    """A model that cannot be compiled ahead of time, or a call with other arguments than it was compiled for."""


class LateCaptureError(BcgError, RuntimeError):
    """A call needs a capture after ``bcg.capture`` had captured all there is."""


class RankError(BcgError, RuntimeError):
    """Ranks that work together disagree, or some of them are missing. Raised on all that are there."""


class TraceError(BcgError, RuntimeError):
    """What cannot be traced: nothing replays, somebody traces already, or the ranges of NVTX are not there."""


class ReleasedError(BcgError, RuntimeError):
    """A program was called after ``bcg.reset()`` had freed it."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """A sentence that offers the names of ``known`` nearest to ``name``; the whole list if none is near."""
    known = sorted(set(known))
    near = difflib.get_close_matches(name, known, n=count, cutoff=0.5)
    if near:
        return "Did you mean " + " or ".join(repr(n) for n in near) + "?"
    if len(known) <= 30:
        return f"Known: {', '.join(known)}." if known else "None is known."
    return f"None of the {len(known)} known names is near it."
