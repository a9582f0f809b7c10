"""`lorrery.plan`, and the figures of `lorrery plan`: what a deployment can serve, and how many replicas a rate needs.

Arithmetic on step times (`worker.device.capacity` has the formulas) gives one replica's figures for streams in a closed
loop, without bursts. The number of replicas for a rate comes from simulation.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.options import LoadOptions
from lorrery.scheduler.replicas import replica_settings
from lorrery.service.errors import SettingsError
from lorrery.service.options import arguments_of
from lorrery.service.settings.cluster import Settings, changed
from lorrery.service.settings.reading import override_of
from lorrery.service.settings.sections import MAX_ADAPTERS
from lorrery.simulator.arguments import read_overrides, read_table
from lorrery.simulator.interface import read_settings
from lorrery.simulator.plan.limits import bound_of, notes_on, only_kind, why_too_long
from lorrery.simulator.plan.options import Claim, PlanOptions
from lorrery.simulator.plan.sizing import (
    Trial,
    Watch,
    adapter_loads,
    busy_rate,
    fewest,
    room_of,
    try_replicas,
    turns_of,
)
from lorrery.simulator.result import data_frame
from lorrery.worker.build import beyond_profile, deployment_of, step_time_of
from lorrery.worker.device.capacity import Capacity, Point, Workload, bytes_of_adapters, replicas_for
from lorrery.worker.device.catalogue.hardware import CatalogueError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ClaimAnswer", "Plan", "Sizing", "make_plan", "plan", "plan_registry", "registry_override"]

MOST_RATE = 1e6
"""Requests per second: a higher rate needs more replicas than a simulation can have."""
LEAST_REQUESTS, MOST_REQUESTS = 1_000, 60_000
"""Requests of a trial; the most take some seconds interpreted, and a plan makes two to ten trials."""
SPANS, LEAST_SPANS = 10, 3
"""A trial lasts SPANS E2E times, long enough to show a growing queue, and LEAST_SPANS at least."""
LEAST_REPLICA_REQUESTS = 20
"""Requests of a trial for each replica: with fewer, no replica has a queue."""

_REGISTRY = "adapters.registry"

WatchOf = Callable[[str], Watch]
"""Deployment's name -> callback for its simulated runs."""


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """Whether a claim holds, in both readings: each stream gets the rate, or all streams together.

    Attributes:
        known_to: most streams for which the total rate was computed; None: computed for all that may run.
    """

    unqueued_ttft: float
    ttft_holds: bool
    stream_tokens: float
    stream_holds: bool
    total_streams: int | None
    total_itl: float | None
    known_to: int | None = None


@dataclass(frozen=True, slots=True)
class Sizing:
    """Result of sizing by simulation.

    Attributes:
        num_requests: of each trial.
        span_seconds: over which they arrive.
        trials: in the order in which they were run.
        num_replicas: the fewest that met the level; None if none did.
        command: repeats the decisive trial on the command line; empty outside the command line.
    """

    num_requests: int
    span_seconds: float
    trials: list[Trial]
    num_replicas: int | None
    command: str = ""


@dataclass(slots=True)
class Plan:
    """The figures of one deployment.

    Attributes:
        name: of the deployment.
        num_gpus: of one replica.
        refused: why there are no figures; None if there are.
        capacity: memory, and the arithmetic behind the points.
        limit_name: the setting that limits the running sequences.
        points: one per concurrency.
        peak: the point with the most tokens per second.
        best: the point with the most streams within the service level; None if not even one is.
        held_back_by: what keeps `best` from more streams.
        notes: what the figures leave out, and why.
        sizing: how many replicas the rate needs, by simulation.
        claim: whether a seller's claim holds.
        made_of: settings and workload of `capacity`, from which unpickling rebuilds it.
    """

    name: str
    num_gpus: int
    refused: str | None = None
    capacity: Capacity | None = field(default=None, compare=False)
    limit_name: str = ""
    points: list[Point] = field(default_factory=list)
    peak: Point | None = None
    best: Point | None = None
    held_back_by: str = ""
    notes: list[str] = field(default_factory=list)
    sizing: Sizing | None = None
    claim: ClaimAnswer | None = None
    made_of: tuple[Settings, Workload] | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the pickled state, with figures as tuples: compiled records and step-time models cannot be pickled."""
        state = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "capacity"}
        state["points"] = [_plain(point) for point in self.points]
        state |= {name: _plain(getattr(self, name)) for name in ("peak", "best")}
        if self.made_of is not None:
            state["made_of"] = (self.made_of[0], _plain(self.made_of[1]))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore such a state."""
        state = dict(state)
        state["points"] = [Point(*values) for values in state["points"]]
        for name in ("peak", "best"):
            state[name] = None if state[name] is None else Point(*state[name])
        if state["made_of"] is not None:
            settings, values = state["made_of"]
            state["made_of"] = settings, Workload(*values)
        for name, value in state.items():
            setattr(self, name, value)
        self.capacity = None if self.made_of is None else _capacity(*self.made_of)

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """All figures of `points` by name, each of shape (points,); times in seconds, rates per second."""
        names = [field.name for field in fields(Point) if field.name != "shares"]
        return {name: np.array([getattr(point, name) for point in self.points]) for name in names}

    def to_pandas(self) -> "pd.DataFrame":
        """Return the columns as a data frame, one row per concurrency.

        Raises:
            ImportError: pandas is not installed.
        """
        return data_frame(self.columns)

    @property
    def num_replicas(self) -> int | None:
        """Fewest replicas that serve the rate; None if no rate was given, or no number suffices."""
        return None if self.sizing is None else self.sizing.num_replicas


@arguments_of(PlanOptions)
def plan(options: PlanOptions) -> Plan:
    """Compute what a worker can serve: memory, latency and throughput over concurrency, and replicas for a rate.

    Raises:
        SettingsError: invalid settings or figures, several kinds of worker, or adapters that the cluster refuses.
    """
    options = read_table(options)
    overrides = read_overrides(options.overrides)
    if isinstance(overrides, Mapping):
        overrides = {**overrides, **options.limits, _REGISTRY: plan_registry(options.work)}
    else:
        limits = (override_of(key, value) for key, value in options.limits.items())
        overrides = [*overrides, *limits, registry_override(options.work)]
    return make_plan(only_kind(read_settings(options.settings, overrides)), options)


def make_plan(
    settings: Settings,
    options: PlanOptions,
    watch: WatchOf = lambda _name: lambda _num_replicas: None,
) -> Plan:
    """Compute what a worker of these settings can serve.

    Args:
        settings: of the cluster, in place of those in `options`; without groups of workers.
        options: checked.
        watch: takes the deployment's name and returns a callback for its simulated runs.

    Raises:
        SettingsError: unknown names, or adapters that the cluster refuses.
    """
    work, own_limit = options.work, options.max_concurrency is not None
    settings = changed(settings, {_REGISTRY: plan_registry(work)})
    deployment = deployment_of(settings)
    name = f"{deployment.model.name} on {deployment.tensor_parallel} x {deployment.gpu.name}"
    result = Plan(name, deployment.tensor_parallel)
    too_long = why_too_long(settings, work)
    if too_long is not None:
        result.refused = f"{name}: {too_long}"
        return result
    try:
        capacity = _capacity(settings, work)
    except CatalogueError as error:
        result.refused = str(error)
        return result
    result.capacity, result.made_of = capacity, (settings, work)
    result.limit_name = settings.scheduler.max_running_setting
    most = capacity.max_concurrency
    if most < 1:
        result.refused = (
            f"{name}: the KV cache holds {capacity.kv_pool_tokens} tokens, less than one request's"
            f" {work.prompt_tokens + work.output_tokens}"
        )
        return result
    asked = options.concurrency or _with_last(_doubling(most), most)
    result.points = [capacity.point(b) for b in asked if b <= most]
    result.notes = notes_on(capacity, [b for b in asked if b > most], own_limit=own_limit)
    best = capacity.most_streams(options.ttft, options.tpot)
    if best:
        result.best = capacity.point(best)
        result.held_back_by = _held_back_by(capacity, best, options)
    shown = [*map(capacity.point, _with_last(_doubling(most), most)), *result.points]
    result.peak = max([*shown, result.best] if result.best else shown, key=lambda point: point.total_tokens)
    if options.claim is not None:
        result.claim = _answer(capacity, options.claim)
    if beyond := beyond_profile(capacity.step_time):
        result.notes.append(f"step times are extrapolated beyond worker.profile: {beyond}")
    if options.rate is not None and result.best is not None:
        running = capacity.running_streams
        at_level = capacity.point(capacity.most_streams(options.ttft, options.tpot, running))
        if settings.is_autoscaled:
            settings = changed(settings, {"autoscaler.enabled": False})
            result.notes.append(
                "replicas are counted without the autoscaler: each run has a fixed number of them; `lorrery simulate"
                " --autoscale` shows what its rule does"
            )
        result.sizing = _size(settings, options, options.rate, at_level, running, watch(name))
    return result


def _capacity(settings: Settings, work: Workload) -> Capacity:
    """Return the arithmetic behind a plan's points.

    Raises:
        SettingsError: unknown names.
        CatalogueError: the model does not fit.
    """
    deployment = deployment_of(settings)
    step_time = step_time_of(settings, deployment)
    pool_tokens = settings.scheduler.max_total_token_num
    places, loads = adapter_loads(settings, deployment.model, work)
    if pool_tokens is None:
        pool_tokens = deployment.kv_pool_tokens(bytes_of_adapters(deployment, work, places))
    replica = replica_settings(settings, pool_tokens)
    return Capacity(deployment, step_time, work, turns_of(replica), room_of(replica, places, loads))


def _plain(record: "Point | Workload | None") -> tuple[Any, ...] | None:
    return None if record is None else tuple(getattr(record, one.name) for one in fields(record))


def _size(settings: Settings, asked: PlanOptions, rate: float, at_level: Point, most: int, watch: Watch) -> Sizing:
    """Find the fewest replicas that serve a rate (requests per second, Poisson) within the level at p99.

    The first guess is the throughput of one busy replica, which ignores queueing. The trials, each a run of
    `lorrery simulate`, include the cost of bursts, waiting and the policy's limits.
    """
    if rate > MOST_RATE:
        raise SettingsError(f"--rate is {rate:g} requests/s; at most {MOST_RATE:g} can be planned for")
    num_requests = asked.num_requests or _num_requests(rate, at_level.e2e)
    work = asked.work
    load = LoadOptions(
        rate=rate,
        num_requests=num_requests,
        input_range=(work.prompt_tokens, work.prompt_tokens),
        output_range=(work.output_tokens, work.output_tokens),
        num_adapters=work.num_adapters or None,
        adapter_exponent=0.0 if work.num_adapters else None,
    )
    guess = replicas_for(rate, _busy_rate(settings, load, asked, at_level, most))
    if guess > 1 and guess * LEAST_REPLICA_REQUESTS > num_requests:
        raise SettingsError(
            f"--rate is {rate:g} requests/s, which takes some {guess:,} replicas; in a run of {num_requests:,} requests"
            f" each gets fewer than {LEAST_REPLICA_REQUESTS}, too few to see a queue: plan for a part of the rate"
            f" and multiply, or take longer runs with --requests {guess * LEAST_REPLICA_REQUESTS}"
        )
    trials = try_replicas(settings, load, ttft=asked.ttft, tpot=asked.tpot, guess=guess, watch=watch)
    return Sizing(num_requests, num_requests / rate, trials, fewest(trials))


def _num_requests(rate: float, e2e: float) -> int:
    """Return the default number of requests of a trial.

    Raises:
        SettingsError: more than can be simulated in reasonable time.
    """
    if LEAST_SPANS * rate * e2e > MOST_REQUESTS:
        part = math.floor(MOST_REQUESTS / (LEAST_SPANS * e2e) * 1000) / 1000
        raise SettingsError(
            f"--rate is {rate:g} requests/s of {e2e:.3g} s each; a run that shows a queue has"
            f" {math.ceil(LEAST_SPANS * rate * e2e):,} requests, and {MOST_REQUESTS:,} at most are simulated unasked:"
            f" plan for --rate {part:.6g} or less and multiply, or say how many with --requests"
        )
    return min(max(math.ceil(SPANS * rate * e2e), LEAST_REQUESTS), MOST_REQUESTS)


def _busy_rate(settings: Settings, load: LoadOptions, asked: PlanOptions, at_level: Point, most: int) -> float:
    """Return a busy replica's requests per second: with all streams that fit, or with as many as arithmetic allows."""
    found = 0.0
    for streams in dict.fromkeys((most, at_level.concurrency)):
        found, tpot = busy_rate(settings, load, streams)
        if asked.tpot is None or tpot <= asked.tpot:
            break
    return found or at_level.requests


def plan_registry(work: Workload) -> list[dict[str, str | int]]:
    """Return the adapters of a plan as the settings' registry, one family for each rank.

    Raises:
        SettingsError: too many.
    """
    if work.num_adapters > MAX_ADAPTERS:
        raise SettingsError(f"--adapters is {work.num_adapters}; at most {MAX_ADAPTERS} can be planned for")
    return [{"id": f"plan-r{rank}", "rank": rank, "count": count} for rank, count in work.adapters_of_rank.items()]


def registry_override(work: Workload) -> str:
    """Return the adapters of a plan as an argument of --set, in place of the settings' own.

    Settings are read with it: other options may not suit the adapters that it replaces.

    Raises:
        SettingsError: too many.
    """
    families = (
        f'{{ id = "{family["id"]}", rank = {family["rank"]}, count = {family["count"]} }}'
        for family in plan_registry(work)
    )
    return f"{_REGISTRY}=[{', '.join(families)}]"


def _answer(capacity: Capacity, claim: Claim) -> ClaimAnswer:
    ttft, alone = capacity.unqueued_ttft(claim.prompt_tokens), 1 / capacity.itl(1)
    streams = capacity.streams_for(claim.tokens_per_second)
    return ClaimAnswer(
        unqueued_ttft=ttft,
        ttft_holds=ttft < claim.ttft,
        stream_tokens=alone,
        stream_holds=alone >= claim.tokens_per_second,
        total_streams=streams,
        total_itl=None if streams is None else capacity.itl(streams),
        known_to=capacity.max_concurrency if capacity.max_concurrency < capacity.running_streams else None,
    )


def _held_back_by(capacity: Capacity, best: int, options: PlanOptions) -> str:
    bound = bound_of(capacity, best, own_limit=options.max_concurrency is not None)
    if bound is not None:
        return bound
    one_more = capacity.point(best + 1)
    return "TTFT" if options.ttft is not None and one_more.ttft > options.ttft else "TPOT"


def _doubling(most: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `most`."""
    return [2**power for power in range(most.bit_length())]


def _with_last(streams: list[int], most: int) -> list[int]:
    return streams if streams[-1] == most else [*streams, most]
