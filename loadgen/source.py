"""Builds the workload of the options. The only module that opens trace files."""

import json
import math
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from shlex import quote
from typing import IO, Final

import numpy as np
import numpy.typing as npt

from lorrery.loadgen import option_rules
from lorrery.loadgen.option_texts import ALL_ADAPTERS, TRACE, expand_adapters, parse_bursts, parse_drift
from lorrery.loadgen.options import GIVEN, LoadOptions
from lorrery.loadgen.reception import ClusterView
from lorrery.loadgen.workload import arrivals, conversations, popularity, slora
from lorrery.loadgen.workload.arrays import Requests
from lorrery.loadgen.workload.arrivals import again_and_again
from lorrery.loadgen.workload.columns import WorkloadColumns
from lorrery.loadgen.workload.conversations import Conversations
from lorrery.loadgen.workload.popularity import drifting_indices
from lorrery.loadgen.workload.recorded import spread, step_seconds
from lorrery.loadgen.workload.request import TraceError, Turn, WorkloadRequest, sessions
from lorrery.loadgen.workload.traces import Trace
from lorrery.service.errors import FormatError, LorreryError, SettingsError
from lorrery.service.files.reading import DAMAGED, damage, open_text

_DEFAULT_EXPONENT = 1.0
_DRAWN = "; --adapters all or --num-adapters N draws adapters"
_NONE_LISTED = (
    "--adapters all: none are listed; adapters.registry lists a cluster's; those of a server whose /v1/models gives"
    " them no parent have to be named: --adapters sql,chat-{0..3}"
)
_SHIPPED = "an excerpt of the trace, the one that ships with Lorrery; --trace FILE plays another"
_SHARED_DRAWS = 1
_ADVISED_RANK = 16
"""S-LoRA's and vLLM's usual rank."""
_LONGEST_ADVICE = 400
_MAX_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True)
class BuiltWorkload:
    """A workload ready to play.

    Attributes:
        requests: in send order.
        attribution: author and licence of the trace; empty for synthetic workloads.
        notes: remarks on how it was made, for the reader of the report.
    """

    requests: Sequence[WorkloadRequest]
    attribution: str
    notes: tuple[str, ...]


def _no_adapters(options: LoadOptions) -> str:
    """Describe which model all requests name; only the server knows whether it is a base model or an adapter."""
    return (f"model {options.model} only" if options.model else "base model only") + _DRAWN


def build_workload(
    options: LoadOptions, known_adapters: Sequence[str], requests: Requests | None = None
) -> BuiltWorkload:
    """Read or draw the workload of the options.

    Args:
        options: of the run.
        known_adapters: listed by the cluster, in its order.
        requests: for the workload `given`; the options on adapters, speed and length apply to these too.

    Raises:
        SettingsError: a value out of range, a file that cannot be opened, adapters that do not exist.
        FormatError: a trace of no known form, or one that does not parse.
    """
    option_rules.check(options)
    try:
        if options.workload == "slora":
            built = _slora(options, known_adapters)
        else:
            with _opened(options) as (options, trace):  # noqa: PLW2901, RUF100  # as its file makes them
                built = _other(options, known_adapters, requests, trace)
    except TraceError as error:
        raise FormatError(f"{options.trace_file}: {error}") from None
    except ValueError as error:
        raise SettingsError(str(error)) from None
    if not built.requests:
        raise SettingsError(_no_requests(options))
    played, notes, wanted = built.requests, built.notes, options.most_requests or 0
    if (num_requests := len(played)) < wanted and (options.trace_file is not None or options.workload == GIVEN):
        if options.concurrency is None:
            notes = (*notes, f"{num_requests:,} requests, not {wanted:,}: there are no more")
        else:
            played = list(islice(again_and_again(played), wanted))
            notes = (*notes, f"{num_requests:,} requests, which are repeated for {wanted:,}")
    if options.concurrency is not None:
        notes = (*notes, f"closed loop of {options.concurrency} clients: the workload's times are not used")
    elif options.speed_up != 1:
        notes = (*notes, f"played {options.speed_up:g} times as fast as recorded or drawn")
    return BuiltWorkload(played, built.attribution, notes)


def _no_requests(options: LoadOptions) -> str:
    if options.trace_file is None:
        return "the workload has no requests; check --num-requests, --duration and --rate"
    if options.has_sessions:
        why = "vLLM's length rules, --num-requests or --duration exclude every conversation"
    else:
        why = "check --num-requests and --duration"
    return f"the workload has no requests: none of {options.trace_file} is left; {why}"


def admissible(options: LoadOptions, workload: BuiltWorkload, cluster: ClusterView) -> tuple[BuiltWorkload, int]:
    """Drop requests that the cluster would refuse, if the options say so; return the rest and the number dropped."""
    if not options.skips_too_long or cluster.max_req_input_len is None or cluster.max_req_total_len is None:
        return workload, 0
    kept = arrivals.fitting(workload.requests, cluster.max_req_input_len, cluster.max_req_total_len)
    num_skipped = len(workload.requests) - len(kept)
    if not kept:
        raise LorreryError(
            f"--skip-too-long leaves nothing: max_req_input_len is {cluster.max_req_input_len},"
            f" max_req_total_len is {cluster.max_req_total_len}"
        )
    return BuiltWorkload(kept, workload.attribution, workload.notes), num_skipped


def _slora(options: LoadOptions, known_adapters: Sequence[str]) -> BuiltWorkload:
    adapters = adapter_names(options, known_adapters)
    num_adapters = options.num_adapters if options.num_adapters is not None else len(adapters)
    # S-LoRA takes a duration and makes int(rate * duration) requests of it; half a request guards against rounding.
    duration = (
        options.schedule_seconds if options.most_requests is None else (options.most_requests + 0.5) / options.rate
    )
    _check_count(int(options.rate * (duration or 0.0)))
    draws = slora.draw(
        num_adapters=num_adapters,
        alpha=options.alpha,
        req_rate=options.rate,
        cv=options.cv,
        duration=duration or 0.0,
        input_range=options.prompt_lengths,
        output_range=options.output_lengths,
        seed=options.seed,
    )
    dirs = expand_adapters(options.adapter_dirs) if options.adapter_dirs and num_adapters else None
    requests = slora.generate_requests(draws, adapter_dirs=dirs, adapters=adapters or None)
    notes: tuple[str, ...] = ("synthetic: S-LoRA's generator", _no_adapters(options))
    if num_adapters:
        notes = (f"synthetic: S-LoRA's generator, adapters by power(alpha={options.alpha:g}) over {num_adapters}",)
    return BuiltWorkload(arrivals.scale(requests, options.speed_up), "", notes)


def _other(
    options: LoadOptions, known_adapters: Sequence[str], given: Requests | None, trace: Trace | None
) -> BuiltWorkload:
    rng = np.random.default_rng(options.seed)
    attribution = ""
    notes: tuple[str, ...] = ()
    requests: Sequence[WorkloadRequest]
    if options.workload == GIVEN:
        if given is None:
            raise SettingsError(f"the workload {GIVEN!r} needs requests")
        requests, notes = given.rows(), ("requests: given by the caller",)
    elif trace is not None and trace.has_times:
        requests, notes = _recorded(options, trace, rng)
    elif options.has_sessions:
        requests, notes = _sessions(options, rng, trace)
    else:
        requests, notes = _synthetic(options, rng)
    if options.shared_prefix is not None:
        requests, note = _shared(options, requests)
        notes = (*notes, note)
    if trace is not None:
        attribution = trace.attribution
        notes = (_recognised(options, trace), *notes, *((_SHIPPED,) if options.trace is None else ()))
    requests = arrivals.scale(requests, options.speed_up)
    # A closed loop has no schedule to cut: its duration ends the sending.
    cut = None if options.concurrency is not None else options.schedule_seconds
    requests = arrivals.limit(requests, options.most_requests, cut)
    adapters = adapter_names(options, known_adapters)
    if not adapters:
        named = any(request.adapter_id is not None for request in requests)
        return BuiltWorkload(requests, attribution, notes if named else (*notes, _no_adapters(options)))
    indices, note = _adapter_indices(options, requests, len(adapters), rng)
    return BuiltWorkload(popularity.assign(requests, adapters, indices), attribution, (*notes, note))


def _adapter_indices(
    options: LoadOptions, requests: Sequence[WorkloadRequest], num_adapters: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int64], str]:
    """Draw an adapter for each request, or for each session; return indices and a note on the method."""
    exponent = _DEFAULT_EXPONENT if options.adapter_exponent is None else options.adapter_exponent
    note = f"adapters are synthetic: Zipf with exponent {exponent:g} over {num_adapters}"
    together = None if _all_alone(requests) else list(sessions(requests))
    begins = requests if together is None else [turns[0] for turns in together]
    if options.drift is None:
        indices = popularity.zipf_indices(num_adapters, len(begins), exponent, rng)
    else:
        at_seconds = np.array([request.at_seconds for request in begins], np.float64)
        try:
            indices = drifting_indices(parse_drift(options.drift), num_adapters, exponent, at_seconds, rng)
        except ValueError as error:
            raise SettingsError(f"--drift {options.drift}: {error}") from None
        note += f", which drifts: {options.drift}"
    if together is not None:
        indices = np.repeat(indices, [len(turns) for turns in together])
    return indices, note


def _shared(options: LoadOptions, requests: Sequence[WorkloadRequest]) -> tuple[list[WorkloadRequest], str]:
    assert options.shared_prefix is not None
    tokens, groups = options.shared_prefix
    # A separate generator keeps times and lengths equal to those of a run without shared prefixes.
    shared = conversations.share_prefixes(
        requests, tokens, groups, np.random.default_rng([options.seed, _SHARED_DRAWS])
    )
    return shared, f"each prompt begins with {tokens} tokens of one of {groups} shared parts, drawn uniformly"


def _all_alone(requests: Sequence[WorkloadRequest]) -> bool:
    """Return whether no request is of a session."""
    if isinstance(requests, WorkloadColumns):
        return requests.chains is None
    return all(request.turn is None for request in requests)


def _recorded(
    options: LoadOptions, trace: Trace, rng: np.random.Generator
) -> tuple[Sequence[WorkloadRequest], tuple[str, ...]]:
    """Read requests with their times."""
    requests = trace.requests(options.most_requests, options.block_tokens, rng)
    if options.jitter:
        return spread(requests, rng, options.jitter), (
            f"requests that share a time were spread over {options.jitter:g} s",
        )
    if options.concurrency is not None or (step := step_seconds(requests)) is None:
        return requests, ()
    seconds, num_sharing = step
    note = (
        f"{num_sharing:,} of {len(requests):,} requests share their time with others, and times step by {seconds:.3g}"
        f" s: they come in bursts (--jitter {seconds:.2g} spreads them)"
    )
    return requests, (note,)


def _recognised(options: LoadOptions, trace: Trace) -> str:
    """Return what the file is, and what was read of it."""
    assert options.trace_file is not None
    return "; ".join([f"{options.trace_file.name}: {trace.title}", *trace.remarks])


def _sessions(
    options: LoadOptions, rng: np.random.Generator, trace: Trace | None
) -> tuple[list[WorkloadRequest], tuple[str, ...]]:
    """Draw or read conversations; arrivals are those of sessions."""
    if trace is not None:
        found = trace.conversations()
        requests = _conversations(options, found, rng)
        rules = " by vLLM's rules" if found.has_limits else ""
        what = f"of {found.num_entries:,} conversations{rules}; their times are drawn"
    else:
        times = _arrival_times(options, rng)
        shape = conversations.ChatShape(
            options.turns_range, options.prompt_lengths, options.output_lengths, options.think
        )
        requests = conversations.chat(times, shape, rng)
        low, high = options.turns_range
        what = f"with {low} to {high} turns, uniform lengths"
    notes = f"sessions {what}; {_arrivals_note(options, 'sessions')}; think time {options.think:g} s on average"
    return requests, (notes,)


def _conversations(options: LoadOptions, found: Conversations, rng: np.random.Generator) -> list[WorkloadRequest]:
    from lorrery.tokenizer.file import open_tokenizer  # the only workload with text

    encode = open_tokenizer(options.tokenizer).encode_stop
    played = found.played(encode, options.turns_range[1], rng)
    count = options.most_requests
    if count is None and options.schedule_seconds is not None:
        count = _enough(options)
    taken = list(islice(played, count))
    times = _arrival_times(options, rng, len(taken))
    thinks = rng.exponential(options.think, (len(taken), options.turns_range[1])).tolist()
    requests: list[WorkloadRequest] = []
    for session, (at, pairs) in enumerate(zip(times.tolist(), taken, strict=True)):
        turns = [
            Turn(session, number, len(ids), thinks[session][number] if number else 0.0, text=text, token_ids=ids)
            for number, (text, ids, _) in enumerate(pairs)
        ]
        requests += conversations.session_requests(len(requests), at, turns, [output for _, _, output in pairs])
    return requests


def _synthetic(options: LoadOptions, rng: np.random.Generator) -> tuple[Sequence[WorkloadRequest], tuple[str, ...]]:
    times = _arrival_times(options, rng)
    requests = arrivals.synthetic(times, options.prompt_lengths, options.output_lengths, rng)
    return requests, (f"synthetic: {_arrivals_note(options, 'requests')}, uniform lengths",)


def _arrival_times(options: LoadOptions, rng: np.random.Generator, count: int | None = None) -> npt.NDArray[np.float64]:
    """Draw `count` arrivals; None: as many as the options may need."""
    count = options.most_requests if count is None else count
    count = _enough(options) if count is None else count
    _check_count(count)
    if options.workload == "constant":
        return arrivals.constant(options.rate, count)
    if options.bursts is not None:
        return arrivals.mmpp(options.rate, parse_bursts(options.bursts), count, rng)
    return arrivals.gamma(options.rate, options.cv, count, rng)


def _check_count(count: int) -> None:
    if count > _MAX_REQUESTS:
        raise SettingsError(
            f"{count:,} requests asked for; {_MAX_REQUESTS:,} is the most that one run plays; look at -n, --duration,"
            " --rate and --speed-up"
        )


def _enough(options: LoadOptions) -> int:
    """Return a number of arrivals that exceeds those due within the duration, which cuts off the rest."""
    expected = options.rate * options.speed_up * (options.schedule_seconds or 0.0)
    spread = max(options.cv, 1.0)
    if options.bursts is not None:
        spread = math.sqrt(parse_bursts(options.bursts).dispersion(options.rate))
    return math.ceil(expected + 6 * spread * math.sqrt(expected)) + 10  # six standard deviations


def _arrivals_note(options: LoadOptions, what: str) -> str:
    if options.workload == "constant":
        process = "constant gaps"
    elif options.bursts is not None:
        bursts = parse_bursts(options.bursts)
        calm, burst = bursts.rates(options.rate)
        process = (
            f"MMPP arrivals ({calm:.3g}/s in calm times, {burst:.3g}/s in bursts of {bursts.burst_seconds:g} s,"
            f" {bursts.share:.0%} of the time; dispersion {bursts.dispersion(options.rate):.3g})"
        )
    elif options.cv == 1:
        process = "Poisson arrivals"
    else:
        process = f"gamma gaps with cv {options.cv:g}"
    return f"{process} at {options.rate:g} {what}/s"


@contextmanager
def _opened(options: LoadOptions) -> Iterator[tuple[LoadOptions, Trace | None]]:
    """Open the workload's file, if it has one; yield it, and the options checked for what it is.

    Raises:
        SettingsError: it cannot be opened, or the options do not go with what is in it.
        FormatError: it is damaged, or not text.
    """
    path = options.trace_file
    if path is None:
        yield options, None
        return
    try:
        with open_text(path) as file:
            trace = Trace(file, FileSpool())
            yield _as_opened(options, trace), trace
    except DAMAGED as error:
        raise FormatError(damage(path, error)) from None
    except OSError as error:
        raise SettingsError(f"--trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FormatError(
            f"{path}: not a text file; read it in Python, and give its columns to lorrery.Requests (docs/simulator.md)"
        ) from None


def _as_opened(options: LoadOptions, trace: Trace) -> LoadOptions:
    if options.workload == TRACE:
        options = options if trace.has_times else replace(options, workload="sharegpt")
    elif options.is_recorded != trace.has_times:
        has = "recorded times" if trace.has_times else "no times"
        raise SettingsError(
            f"--workload {options.workload}: {options.trace_file} is of another kind: {trace.title}, with {has}; leave"
            " out --workload"
        )
    try:
        option_rules.check_opened(options)
    except SettingsError as error:
        raise SettingsError(f"{options.trace_file} is {trace.title}: {error}") from None
    return options


def adapter_names(options: LoadOptions, known_adapters: Sequence[str]) -> list[str]:
    """Return the adapters to draw from; empty means the base model, or those of `--adapter-dirs`.

    Raises:
        SettingsError: there are fewer than the options ask for.
    """
    if options.adapter_dirs or options.num_adapters == 0:
        return []
    if options.adapters is not None and options.adapters != ALL_ADAPTERS:
        names = expand_adapters(options.adapters)
    elif options.adapters == ALL_ADAPTERS and not known_adapters:
        raise SettingsError(_NONE_LISTED)
    elif options.adapters == ALL_ADAPTERS or options.num_adapters is not None:
        names = list(known_adapters)
    else:
        return []
    if options.num_adapters is None:
        return names
    if len(names) < options.num_adapters:
        if options.adapters not in (None, ALL_ADAPTERS):
            raise SettingsError(f"--num-adapters {options.num_adapters}: --adapters names only {len(names)}")
        raise SettingsError(
            f"--num-adapters {options.num_adapters}: the cluster lists only {len(names)};"
            f" {registry_advice([f'lora-{number}' for number in range(options.num_adapters)])}"
        )
    return names[: options.num_adapters]


def registry_advice(names: Sequence[str]) -> str:
    """Return how a cluster's settings list some adapters, for an error: `a-0`, `a-1`, ... are a family."""
    numbers: dict[str, set[str]] = {}
    for name in names:
        head, _, number = name.rpartition("-")
        numbers.setdefault(head, set()).add(number)
    entries = dict[str, None]()
    for name in names:
        head = name.rpartition("-")[0]
        count = len(numbers[head])
        is_family = head and count > 1 and numbers[head] == set(map(str, range(count)))
        own = f"id={json.dumps(head if is_family else name)}, rank={_ADVISED_RANK}"
        entries[f"{{{own}, count={count}}}" if is_family else f"{{{own}}}"] = None
    override = quote(f"adapters.registry=[{', '.join(entries)}]")
    if len(override) > _LONGEST_ADVICE:
        return "list them in adapters.registry"
    return f"a registry that has them, here at rank {_ADVISED_RANK}: --set {override}"


MEMORY_BYTES: Final = 1 << 25
"""Kept before a write."""


class FileSpool:
    """Bytes of a trace that may be too many for memory: in memory while they are few, then in an unnamed file.

    Block ids are most of a trace of prefixes, and texts most of a file of conversations, while a run reads one request
    after another. The file disappears with the process, however it ends. If none can be written, the bytes stay in
    memory. It is in the folder named by `TMPDIR`, else in `/tmp`; if that is in memory (tmpfs), the file saves none:
    name a folder on a disk.
    """

    def __init__(self) -> None:
        self._open = bytearray()
        self._num_written = 0
        self._file: IO[bytes] | None = None
        self._can_write = True

    def add(self, piece: bytes) -> int:
        """See `Spool`."""
        place = self._num_written + len(self._open)
        self._open += piece
        if self._can_write and len(self._open) >= MEMORY_BYTES:
            self._write()
        return place

    def read(self, place: int, size: int) -> bytes:
        """See `Spool`."""
        at = place - self._num_written
        if at >= 0:
            return bytes(self._open[at : at + size])
        assert self._file is not None
        return os.pread(self._file.fileno(), size, place)

    def _write(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="lorrery-", buffering=0)  # noqa: SIM115  # kept open
                weakref.finalize(self, self._file.close)
            written = 0
            with memoryview(self._open) as content:
                while written < len(content):
                    written += os.pwrite(self._file.fileno(), content[written:], self._num_written + written)
            self._num_written += written
            self._open = bytearray()
        except OSError:  # no space, or no writable folder
            self._can_write = False
