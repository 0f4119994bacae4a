"""Admission: whether a call replays in a bucket or runs eagerly, and why.

Note [One function decides]
A scheduler asks before it forms a batch, the forward asks before it runs one, and ranks that work together must all get
the same answer. So ``admit`` is a pure function of what it is given, and all of them build the same ``Batch`` for it.
What is not known of a batch never means yes: where a limit restricts, a batch that does not say how it stands to the
limit is refused.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, Literal, get_args

from bcg_compiler.errors import AdmissionError, nearest

#: ``none``: the model looks them up itself; ``given``: the caller passes them; ``replaced``: the caller changes some.
Embeddings = Literal["none", "given", "replaced"]

#: The hidden states that the caller wants back, each including those before it.
HiddenStates = Literal["none", "last", "all"]

#: Why a batch is refused, in the order in which it is judged.
Refusal = Literal[
    "no_bucket",
    "few_rows",
    "too_long",
    "padding",
    "cp_capacity",
    "requests",
    "prefix_chunks",
    "prefix",
    "embeddings",
    "adapter",
    "target_verify",
    "hidden_states",
    "logprobs",
    "veto",
]

#: A rule of the user's: what speaks against a replay of this batch, ``None`` for nothing.
Veto = Callable[["Batch"], str | None]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What is known of one call; ``None`` where it is not. Raises ``AdmissionError`` for what no batch can be."""

    rows: int
    """Live tokens. 0 for a rank that has none while others work."""
    local_rows: int | None = None
    """Under context parallelism, the rows that each rank must have room for (``Zigzag.required``): alike on all."""
    requests: int | None = None
    prefix_lengths: tuple[int, ...] | None = None
    """Tokens of each request that were computed before: all 0 where there is no prefix."""
    prefix_chunks: int | None = None
    """Parts in which attention reads the prefixes."""
    embeddings: Embeddings | None = None
    adapters: tuple[str, ...] | None = None
    """Names of the adapters that its requests use; ``()`` for none."""
    target_verify: bool | None = None
    """Whether it checks the tokens that a draft model proposed."""
    hidden_states: HiddenStates | None = None
    logprobs: bool | None = None
    """Whether log-probabilities of its tokens are wanted."""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What the user's own vetoes read."""

    def __post_init__(self) -> None:
        _set(self, "rows", _whole("rows", self.rows))
        if self.local_rows is not None:
            _set(self, "local_rows", _whole("local_rows", self.local_rows))
        if self.requests is not None:
            _set(self, "requests", _whole("requests", self.requests))
        if self.prefix_lengths is not None:
            lengths = enumerate(_items("prefix_lengths", self.prefix_lengths))
            _set(self, "prefix_lengths", tuple(_whole(f"prefix_lengths[{at}]", length) for at, length in lengths))
        if self.prefix_chunks is not None:
            _set(self, "prefix_chunks", _whole("prefix_chunks", self.prefix_chunks))
        if self.embeddings is not None:
            _check_word("embeddings", self.embeddings, get_args(Embeddings))
        if self.adapters is not None:
            _set(self, "adapters", tuple(_names("adapters", self.adapters)))
        if self.target_verify is not None:
            _check_flag("target_verify", self.target_verify)
        if self.hidden_states is not None:
            _check_word("hidden_states", self.hidden_states, get_args(HiddenStates))
        if self.logprobs is not None:
            _check_flag("logprobs", self.logprobs)
        if not isinstance(self.extra, Mapping):
            raise _wrong_type("extra", self.extra, "a dictionary")
        # A copy: the batch stays as it is when the caller's dictionary changes.
        _set(self, "extra", dict(self.extra))
        self._check_requests()

    def _check_requests(self) -> None:
        """A batch of no request would be within any number of them, and have no prefix."""
        lengths, requests = self.prefix_lengths, self.requests
        if lengths is not None and requests is not None and requests != len(lengths):
            raise AdmissionError(
                f"requests is {requests}, and prefix_lengths has {len(lengths)}. Give one length for each request, 0 "
                "where it has no prefix."
            )
        if self.rows and (requests == 0 or lengths == ()):
            name, value = ("requests", requests) if requests == 0 else ("prefix_lengths", lengths)
            raise AdmissionError(
                f"{name} is {value}, and rows is {self.rows}: these tokens belong to a request. Count it, or leave "
                f"{name} out if it is not known."
            )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a captured program can do. Raises ``AdmissionError`` for limits that no program can have."""

    max_padding_factor: float = 2.0
    """How many times its live rows a batch may be padded to; ``math.inf`` for any. Taken as it is written: 100 rows go
    to 115 by 1.15, though in binary that is less. The first bucket is exempt."""
    least: int = 1
    """The fewest live rows that the program is right for (``RowVerdict.least``)."""
    captured_rows: Mapping[int, int] | None = field(default=None, hash=False)
    """Under context parallelism, bucket → rows of a rank that were captured for it; one that is not in it is not used.
    ``None``: a bucket has room for as many rows as it has tokens."""
    max_requests: int | None = None
    """``None``: what is captured does not depend on their number."""
    max_prefix_chunks: int | None = None
    """``None``: what is captured does not depend on their number."""
    prefixes: bool = True
    embeddings: frozenset[Embeddings] = frozenset(get_args(Embeddings))
    """All, because Dynamo guards on the tensors that a call is given."""
    adapters: frozenset[str] | None = None
    """Those that are captured; ``None``: any."""
    target_verify: bool = True
    hidden_states: HiddenStates = "all"
    """The most that is captured."""
    logprobs: bool = True
    """Whether there is an eager tail to compute them."""
    vetoes: tuple[Veto, ...] = ()
    """Asked last, in order; what they raise reaches the caller. Ranks must get the same answers from them."""

    _factor: tuple[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _set(self, "_factor", _ratio(self.max_padding_factor))
        _set(self, "least", _whole("least", self.least))
        if self.captured_rows is not None:
            _set(self, "captured_rows", _captured_rows(self.captured_rows))
        if self.max_requests is not None:
            _set(self, "max_requests", _whole("max_requests", self.max_requests, least=1))
        if self.max_prefix_chunks is not None:
            _set(self, "max_prefix_chunks", _whole("max_prefix_chunks", self.max_prefix_chunks))
        embeddings = frozenset(_names("embeddings", self.embeddings))
        for kind in embeddings:
            _check_word("embeddings", kind, get_args(Embeddings))
        if not embeddings:
            raise AdmissionError("embeddings is empty: no batch would ever replay. Give at least one kind.")
        _set(self, "embeddings", embeddings)
        if self.adapters is not None:
            _set(self, "adapters", frozenset(_names("adapters", self.adapters)))
        _check_word("hidden_states", self.hidden_states, get_args(HiddenStates))
        for name in ("prefixes", "target_verify", "logprobs"):
            _check_flag(name, getattr(self, name))
        vetoes = tuple(_items("vetoes", self.vetoes))
        for at, veto in enumerate(vetoes):
            if not callable(veto):
                raise _wrong_type(f"vetoes[{at}]", veto, "a function of a Batch")
        _set(self, "vetoes", vetoes)


@dataclass(frozen=True)
class Admission:
    """Whether a batch replays."""

    bucket: int | None
    """Tokens; ``None`` where it runs eagerly."""
    reason: str
    """Why it runs eagerly, a code of ``docs/reasons.md``: a ``Refusal``, or why the program is not captured at all."""
    text: str
    """A sentence with the numbers, and with what would change it."""
    rows: int

    @property
    def replays(self) -> bool:
        return self.bucket is not None


def admit(batch: Batch, buckets: Sequence[int], limits: Limits) -> Admission:
    """The smallest bucket that holds a batch, or the first reason against it. See Note [One function decides].

    ``buckets`` ascend (``Ladder.buckets``). Every batch gets an answer; nothing is raised but what a veto raises.
    """
    rows = batch.rows
    if not buckets:
        return _refuse(rows, "no_bucket", f"rows is {rows}, and there is no bucket: a captured one would hold them.")
    if rows < limits.least:
        text = (
            f"rows is {rows}, and the program is right for {limits.least} or more: a batch with more rows may replay."
        )
        return _refuse(rows, "few_rows", text)
    at = bisect_left(buckets, rows)
    if at == len(buckets):
        text = f"rows is {rows}, above the last bucket, {buckets[-1]}: a larger bucket would hold them."
        return _refuse(rows, "too_long", text)
    bucket = buckets[at]
    if at and not _within_factor(bucket, rows, limits):
        return _refuse(rows, "padding", _padding(rows, bucket, limits))
    if limits.captured_rows is not None:
        # The rows of the longest rank depend on how the tokens are spread over requests: a larger bucket may do.
        above = (b for b in buckets[at:] if b == bucket or _within_factor(b, rows, limits))
        held = batch.local_rows
        fits = None if held is None else next((b for b in above if limits.captured_rows.get(b, -1) >= held), None)
        if fits is None:
            return _refuse(rows, "cp_capacity", _capacity(batch, buckets[at:], limits))
        bucket = fits
    refused = _beyond(batch, limits) or (_vetoed(batch, limits.vetoes) if limits.vetoes else None)
    if refused:
        return _refuse(rows, *refused)
    return Admission(bucket, "", f"rows is {rows}: replays in bucket {bucket}.", rows)


def _refuse(rows: int, reason: Refusal, text: str) -> Admission:
    return Admission(None, reason, text, rows)


def _within_factor(bucket: int, rows: int, limits: Limits) -> bool:
    times, over = limits._factor
    return bucket * over <= rows * times


def _capacity(batch: Batch, above: Sequence[int], limits: Limits) -> str:
    """Why none of the buckets from the smallest one that holds a batch on has room for the rows of its ranks."""
    assert limits.captured_rows is not None
    if batch.local_rows is None:
        return (
            "local_rows is not known, and captured_rows limits it: a batch that says how many rows each of its "
            "context-parallel ranks must have room for may replay."
        )
    tried = [b for at, b in enumerate(above) if not at or _within_factor(b, batch.rows, limits)]
    most = max((limits.captured_rows[b] for b in tried if b in limits.captured_rows), default=None)
    found = (
        "no rows of a rank are known to be captured" if most is None else f"at most {most} rows of a rank are captured"
    )
    return (
        f"local_rows is {batch.local_rows}, and {found} for the buckets that {batch.rows} rows may be padded to, "
        f"{', '.join(map(str, tried))}: a ladder with a larger bucket there, or a higher max_padding_factor, may let "
        "them replay."
    )


def _padding(rows: int, bucket: int, limits: Limits) -> str:
    times, over = limits._factor
    return (
        f"rows is {rows}, and the smallest bucket that holds them, {bucket}, is more than {limits.max_padding_factor} "
        f"times as large: a bucket of at most {rows * times // over}, or a max_padding_factor of "
        f"{-(-100 * bucket // rows) / 100}, may let them replay."
    )


def _beyond(batch: Batch, limits: Limits) -> tuple[Refusal, str] | None:
    """The first limit that a batch is beyond, or does not say how it stands to."""
    if (most := limits.max_requests) is not None and (batch.requests is None or batch.requests > most):
        return "requests", _text("requests", batch.requests, f"{most} or fewer are captured")
    if (most := limits.max_prefix_chunks) is not None and (batch.prefix_chunks is None or batch.prefix_chunks > most):
        return "prefix_chunks", _text("prefix_chunks", batch.prefix_chunks, f"{most} or fewer are captured")
    if not limits.prefixes and (batch.prefix_lengths is None or any(batch.prefix_lengths)):
        longest = None if batch.prefix_lengths is None else max(batch.prefix_lengths)
        return "prefix", _text("max(prefix_lengths)", longest, "0, no prefix, is captured")
    if len(limits.embeddings) < len(get_args(Embeddings)) and batch.embeddings not in limits.embeddings:
        return "embeddings", _text("embeddings", batch.embeddings, f"{_either(limits.embeddings)} is captured")
    if limits.adapters is not None and (batch.adapters is None or not limits.adapters.issuperset(batch.adapters)):
        return "adapter", _text("adapters", batch.adapters, f"{_either(limits.adapters) or 'none'} is captured")
    if not limits.target_verify and batch.target_verify is not False:
        return "target_verify", _text("target_verify", batch.target_verify, "False is captured")
    if limits.hidden_states != "all" and not _within(batch.hidden_states, limits.hidden_states):
        return "hidden_states", _text(
            "hidden_states", batch.hidden_states, f"at most {limits.hidden_states!r} is captured"
        )
    if not limits.logprobs and batch.logprobs is not False:
        return "logprobs", _text("logprobs", batch.logprobs, "no eager tail computes them")
    return None


def _vetoed(batch: Batch, vetoes: tuple[Veto, ...]) -> tuple[Refusal, str] | None:
    for veto in vetoes:
        said = veto(batch)
        if said is not None:
            name = getattr(veto, "__qualname__", None) or type(veto).__qualname__
            return "veto", f"The veto {name} returned {said!r}: None lets a batch replay."
    return None


def _within(wanted: HiddenStates | None, captured: HiddenStates) -> bool:
    kinds = get_args(HiddenStates)
    return wanted is not None and kinds.index(wanted) <= kinds.index(captured)


def _text(name: str, value: Any, captured: str) -> str:
    if value is None:
        return f"{name} is not known, and {captured}: a batch that says that it is within that may replay."
    return f"{name} is {value!r}, and {captured}: a batch within that may replay."


def _either(names: Iterable[str]) -> str:
    return " or ".join(repr(name) for name in sorted(names))


def _ratio(factor: float) -> tuple[int, int]:
    """A padding factor as two whole numbers; 1 over 0 for an infinite one, which no bucket is above."""
    if isinstance(factor, bool) or not isinstance(factor, Real) or not factor >= 1:
        raise AdmissionError(
            f"max_padding_factor is {factor!r}; it must be a number of at least 1: how many times its live rows a "
            "batch may be padded to."
        )
    return (1, 0) if factor == float("inf") else Fraction(str(factor)).as_integer_ratio()


def _captured_rows(given: Any) -> dict[int, int]:
    if not isinstance(given, Mapping):
        raise _wrong_type("captured_rows", given, "a dictionary from buckets to rows")
    return {
        _whole("A bucket of captured_rows", bucket, least=1): _whole(f"captured_rows[{bucket}]", rows)
        for bucket, rows in given.items()
    }


def _set(made: Any, name: str, value: Any) -> None:
    object.__setattr__(made, name, value)


def _whole(name: str, value: Any, least: int = 0) -> int:
    """A whole number, of Python or NumPy. ``True`` is never meant as one."""
    if type(value) is int and value >= least:  # The usual case, at each call.
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong_type(name, value, "an int")
    if value < least:
        raise AdmissionError(f"{name} is {value}; it must be at least {least}.")
    return int(value)


def _items(name: str, value: Any) -> Iterable[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _wrong_type(name, value, "a tuple")
    return value


def _names(name: str, value: Any) -> Iterable[str]:
    for item in _items(name, value):
        if not isinstance(item, str):
            raise _wrong_type(f"An item of {name}", item, "a string")
        yield item


def _check_word(name: str, value: Any, words: tuple[str, ...]) -> None:
    if value not in words:
        raise AdmissionError(f"{name} is {value!r}, which is none of its values. {nearest(str(value), words)}")


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _wrong_type(name, value, "True or False")


def _wrong_type(name: str, value: Any, wanted: str) -> AdmissionError:
    return AdmissionError(f"{name} is {value!r} ({type(value).__name__}); it must be {wanted}.")
