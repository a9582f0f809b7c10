"""The workload that the options ask for. The one place where trace files are opened."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lorrery.chassis.errors import FormatError, LorreryError, SettingsError
from lorrery.loadgen.cluster_view import ClusterView
from lorrery.loadgen.options import ALL_ADAPTERS, GIVEN, LoadOptions, expand_adapters
from lorrery.loadgen.workload import arrivals, azure, mooncake, popularity, slora
from lorrery.loadgen.workload.arrays import Requests
from lorrery.loadgen.workload.request import TraceError, WorkloadRequest

__all__ = ["BuiltWorkload", "admissible", "build_workload"]

_DEFAULT_EXPONENT = 1.0
_NO_ADAPTERS = "base model only; --adapters all or --num-adapters N draws adapters"
_SHIPPED = "an excerpt of the trace, the one that ships with Lorrery; --trace FILE plays another"
_MAX_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True)
class BuiltWorkload:
    """A workload ready to play.

    Attributes:
        requests: in send order.
        attribution: whose trace it is and under which licence; empty for synthetic ones.
        notes: what a reader of the report must know of how it was made.
    """

    requests: list[WorkloadRequest]
    attribution: str
    notes: tuple[str, ...]


def build_workload(
    options: LoadOptions, known_adapters: Sequence[str], requests: Requests | None = None
) -> BuiltWorkload:
    """Read or draw the workload that the options ask for.

    Args:
        options: what is asked for.
        known_adapters: what the cluster lists, in its order.
        requests: of the workload `given`; what the options say of adapters, speed and length goes for these too.

    Raises:
        SettingsError: a value out of range, a file that cannot be opened, adapters that are not there.
        FormatError: a trace that does not parse.
    """
    options.check()
    try:
        built = (
            _slora(options, known_adapters)
            if options.workload == "slora"
            else _other(options, known_adapters, requests)
        )
    except TraceError as error:
        raise FormatError(f"{options.trace_file}: {error}") from None
    except ValueError as error:
        raise SettingsError(str(error)) from None
    if not built.requests:
        raise SettingsError("the workload has no requests; look at --num-requests, --duration and --rate")
    if options.concurrency is not None:
        note = f"closed loop of {options.concurrency} clients: the workload's times are not used"
    elif options.speed_up == 1:
        return built
    else:
        note = f"played {options.speed_up:g} times as fast as recorded or drawn"
    return BuiltWorkload(built.requests, built.attribution, (*built.notes, note))


def admissible(options: LoadOptions, workload: BuiltWorkload, cluster: ClusterView) -> tuple[BuiltWorkload, int]:
    """Leave out what the cluster would refuse, if the options say so; give how many that were."""
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
    adapters = _adapter_names(options, known_adapters)
    num_adapters = options.num_adapters if options.num_adapters is not None else len(adapters)
    # S-LoRA takes a duration and makes int(rate * duration) requests of it; half a request guards against rounding.
    duration = options.schedule_seconds if options.num_requests is None else (options.num_requests + 0.5) / options.rate
    draws = slora.draw(
        num_adapters=num_adapters,
        alpha=options.alpha,
        req_rate=options.rate,
        cv=options.cv,
        duration=duration or 0.0,
        input_range=options.input_range,
        output_range=options.output_range,
        seed=options.seed,
    )
    dirs = expand_adapters(options.adapter_dirs) if options.adapter_dirs and num_adapters else None
    requests = slora.generate_requests(draws, adapter_dirs=dirs, adapters=adapters or None)
    notes: tuple[str, ...] = ("synthetic: S-LoRA's generator", _NO_ADAPTERS)
    if num_adapters:
        notes = (f"synthetic: S-LoRA's generator, adapters by power(alpha={options.alpha:g}) over {num_adapters}",)
    return BuiltWorkload(arrivals.scale(requests, options.speed_up), "", notes)


def _other(options: LoadOptions, known_adapters: Sequence[str], given: Requests | None) -> BuiltWorkload:
    rng = np.random.default_rng(options.seed)
    attribution = ""
    notes: tuple[str, ...] = ()
    if options.workload == GIVEN:
        if given is None:
            raise SettingsError(f"the workload {GIVEN!r} needs requests")
        requests, notes = given.rows(), ("requests: given by the caller",)
    elif options.workload == "azure":
        requests, attribution = _read(options, azure.read_azure), azure.ATTRIBUTION
    elif options.workload == "mooncake":
        requests, attribution = _read(options, mooncake.read_mooncake), mooncake.ATTRIBUTION
        if options.jitter:
            requests = mooncake.spread(requests, rng, options.jitter)
            notes = (f"requests that share a stamp were spread over {options.jitter:g} s",)
        else:
            notes = ("stamps step by about 3 s, so requests come in bursts (--jitter 3 spreads them)",)
    else:
        requests, notes = _synthetic(options, rng)
    if options.trace_file is not None and options.trace is None:
        notes = (*notes, _SHIPPED)
    requests = arrivals.scale(requests, options.speed_up)
    # A closed loop has no schedule to cut: its duration ends the sending.
    cut = None if options.concurrency is not None else options.schedule_seconds
    requests = arrivals.limit(requests, options.num_requests, cut)
    adapters = _adapter_names(options, known_adapters)
    if not adapters:
        named = any(request.adapter_id is not None for request in requests)
        return BuiltWorkload(requests, attribution, notes if named else (*notes, _NO_ADAPTERS))
    exponent = _DEFAULT_EXPONENT if options.adapter_exponent is None else options.adapter_exponent
    indices = popularity.zipf_indices(len(adapters), len(requests), exponent, rng)
    note = f"adapters are synthetic: Zipf with exponent {exponent:g} over {len(adapters)}"
    return BuiltWorkload(popularity.assign(requests, adapters, indices), attribution, (*notes, note))


def _synthetic(options: LoadOptions, rng: np.random.Generator) -> tuple[list[WorkloadRequest], tuple[str, ...]]:
    count = options.num_requests
    if count is None:
        expected = options.rate * options.speed_up * (options.schedule_seconds or 0.0)
        # Six standard deviations more than expected: the last ones lie beyond the duration, which cuts them off.
        count = math.ceil(expected + 6 * max(options.cv, 1.0) * math.sqrt(expected)) + 10
    if count > _MAX_REQUESTS:
        raise SettingsError(f"{count} requests asked for; {_MAX_REQUESTS} is the most that one run plays")
    if options.workload == "constant":
        times = arrivals.constant(options.rate, count)
        process = "constant gaps"
    else:
        times = arrivals.gamma(options.rate, options.cv, count, rng)
        process = "Poisson arrivals" if options.cv == 1 else f"gamma gaps with cv {options.cv:g}"
    requests = arrivals.synthetic(times, options.input_range, options.output_range, rng)
    return requests, (f"synthetic: {process} at {options.rate:g} requests/s, uniform lengths",)


def _read(
    options: LoadOptions, reader: Callable[[Iterable[str], int | None], list[WorkloadRequest]]
) -> list[WorkloadRequest]:
    path = options.trace_file
    assert path is not None
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return reader(file, options.num_requests)
    except OSError as error:
        raise SettingsError(f"--trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FormatError(f"{path}: not a text file") from None


def _adapter_names(options: LoadOptions, known_adapters: Sequence[str]) -> list[str]:
    """List the adapters to draw from; none means the base model."""
    if options.adapter_dirs or options.num_adapters == 0:
        return []
    if options.adapters is not None and options.adapters != ALL_ADAPTERS:
        names = expand_adapters(options.adapters)
    elif options.adapters == ALL_ADAPTERS or options.num_adapters is not None:
        names = list(known_adapters)
    else:
        return []
    if options.num_adapters is None:
        return names
    if len(names) < options.num_adapters:
        whose = "the cluster lists" if options.adapters in (None, ALL_ADAPTERS) else "--adapters names"
        raise SettingsError(f"--num-adapters {options.num_adapters}: {whose} only {len(names)}")
    return names[: options.num_adapters]
