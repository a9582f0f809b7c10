"""The cheapest cluster for a rate, and what surrounds it: room for more tenants, what more money buys, what if.

Everything is simulated (`trials`); several runs at a time where there are cores for them.
"""

import math
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context

from lorrery.service.errors import SettingsError
from lorrery.service.linux import START_METHOD
from lorrery.service.settings.cluster import Settings, changed
from lorrery.simulator.plan.level import Level
from lorrery.simulator.plan.options import PlanOptions
from lorrery.simulator.plan.search import Answer, Rejected, Task, cheapest
from lorrery.simulator.plan.shapes import Shape, axes_of, shapes_of
from lorrery.simulator.plan.trials import REGISTRY, SEED, Trial, load_of, plan_registry, serve
from lorrery.worker.device.capacity import Workload

__all__ = ["Around", "Asked", "Search", "Tenants", "around", "search_for"]

MOST_RATE = 1e6
"""Requests per second: a higher rate needs more replicas than a simulation can have."""
LEAST_REQUESTS, MOST_REQUESTS = 1_000, 60_000
"""Requests of a run; the most take some seconds."""
SPANS, LEAST_SPANS = 6, 3
"""A run lasts SPANS E2E times, long enough to show a growing queue, and LEAST_SPANS at least."""
LEAST_REPLICA_REQUESTS = 20
"""Requests of a run for each replica: with fewer, no replica has a queue."""

Watch = Callable[[str, bool], None]
"""Called with what was simulated, in words, and whether it kept the level."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The load of a run, and the level to keep; travels to processes.

    Attributes:
        work: the requests.
        rate: of them, per second.
        num_requests: of a run.
        level: to keep.
        drift: of the adapters' popularity, as for `lorrery load`.
    """

    work: Workload
    rate: float
    num_requests: int
    level: Level
    drift: str | None = None

    def run(self, task: Task) -> Trial:
        """Simulate a cluster."""
        shape, number, seed, gives_up = task
        load = load_of(self.work, self.rate, self.num_requests, seed, self.drift)
        return serve(shape.settings, load, self.level, number, gives_up=gives_up)


def _run(one: tuple[Asked, Task]) -> Trial:
    asked, task = one
    return asked.run(task)


RunAll = Callable[[Sequence[tuple[Asked, Task]]], Iterable[Trial]]
"""Simulates clusters, each under its load, several at a time."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """How many tenants the answer has room for, each with its adapter and as much traffic as each of them has now.

    Attributes:
        held: the most that keep the level, in one run.
        at_least: whether no number was found that does not.
    """

    held: int
    at_least: bool


@dataclass(frozen=True, slots=True)
class Offer:
    """What a cluster costs, and what it gives."""

    shape: Shape
    trial: Trial


@dataclass(frozen=True, slots=True)
class Around:
    """What surrounds the answer.

    Attributes:
        offers: it and others for as much money, less and more, by cost.
        variations: the answer under another load: what differs, and how it fared.
    """

    offers: Sequence[Offer]
    variations: Sequence[tuple[str, Trial]]


@dataclass(slots=True)
class Search:
    """The cheapest cluster for a rate.

    Attributes:
        asked: the load of each run; None: no shape was possible.
        span_seconds: over which its requests arrive.
        not_shapes: combinations without a bound, and why.
        least: of all shapes the one whose bound is lowest; None: there is none.
        answer: what was found.
        tenants: that it has room for; None: without adapters, or none was found.
        around: the answer, if it was asked for.
        notes: what it leaves out.
        command: repeats the run that decided it.
    """

    asked: Asked | None = None
    span_seconds: float = 0.0
    not_shapes: list[str] = field(default_factory=list)
    least: Shape | None = None
    answer: Answer = field(default_factory=Answer)
    tenants: Tenants | None = None
    around: Around | None = None
    notes: list[str] = field(default_factory=list)
    command: str = ""


def search_for(
    settings: Settings,
    options: PlanOptions,
    search: Search,
    given: Iterable[str] = (),
    watch: Watch = lambda _what, _met: None,
    bounded: Callable[[Search], None] = lambda _search: None,
) -> None:
    """Search for the cheapest cluster that serves the rate.

    Args:
        settings: of the cluster, without groups of workers.
        options: checked.
        search: to fill, so that a caller who interrupts has the best so far.
        given: settings that the caller has chosen, which are not searched over.
        watch: called after each run.
        bounded: called when the bounds are known, before the first run.

    Raises:
        SettingsError: unknown names, or a rate that cannot be simulated.
    """
    rate, work, level = options.rate, options.work, options.level
    assert rate is not None
    assert isinstance(options.search, tuple)
    if rate > MOST_RATE:
        raise SettingsError(f"--rate is {rate:g} requests/s; at most {MOST_RATE:g} can be planned for")
    alone: dict[str, object] = {"worker.gpus": 1, REGISTRY: plan_registry(work)}
    if settings.is_autoscaled:
        alone["autoscaler.enabled"] = False
        search.notes.append(
            "replicas are counted without the autoscaler: each run has a fixed number of them; `lorrery simulate"
            " --autoscale` shows what its rule does"
        )
    settings = changed(settings, alone)
    found = list(shapes_of(settings, work, level, rate, axes_of(settings, work, options.search, given)))
    shapes = [one for one in found if isinstance(one, Shape)]
    search.not_shapes = [one for one in found if isinstance(one, str)]
    if not shapes:
        search.answer.finished = True
        return
    least = search.least = min(shapes, key=lambda one: (one.usd_per_hour or one.num_gpus) * one.least)
    num_requests = options.num_requests or _num_requests(rate, least.e2e)
    search.span_seconds = num_requests / rate
    if least.least > 1 and least.least * LEAST_REPLICA_REQUESTS > num_requests:
        raise SettingsError(
            f"--rate is {rate:g} requests/s, which takes some {least.least:,} replicas; in a run of"
            f" {num_requests:,} requests each gets fewer than {LEAST_REPLICA_REQUESTS}, too few to see a queue:"
            f" plan for a part of the rate and multiply, or take longer runs with --requests"
            f" {least.least * LEAST_REPLICA_REQUESTS}"
        )
    asked = search.asked = Asked(work, rate, num_requests, level, options.drift)
    bounded(search)
    jobs = options.jobs or 1
    with _runner(jobs) as run_all:

        def watched(tasks: Sequence[Task]) -> Iterator[Trial]:
            trials = run_all([(asked, task) for task in tasks])
            for (shape, number, _, _), trial in zip(tasks, trials, strict=True):
                yield trial
                watch(f"{number} x {shape.name}", trial.met)

        cheapest(shapes, level, watched, search.answer, num_seeds=options.seeds, at_once=jobs)
        if work.num_adapters and search.answer.shape is not None:
            search.tenants = _tenants(search, run_all, watch)


def _tenants(search: Search, run_all: RunAll, watch: Watch) -> Tenants:
    """Find how many tenants the answer has room for: fewer than would fill one replica more."""
    answer, asked = search.answer, search.asked
    assert answer.shape is not None
    assert asked is not None
    now, number = asked.work.num_adapters, answer.num_replicas
    low = now
    high = most = math.ceil(now * (number + 1) / number) + 1
    while low + 1 < high:
        tenants = (low + high) // 2
        grown = _busier(_with_adapters(asked, tenants), tenants / now)
        (trial,) = run_all([(grown, (_for(grown, answer.shape), number, SEED, True))])
        answer.num_trials += 1
        watch(f"{tenants} tenants", trial.met)
        low, high = (tenants, high) if trial.met else (low, tenants)
    return Tenants(low, at_least=high == most)


def _busier(asked: Asked, factor: float) -> Asked:
    return replace(asked, rate=asked.rate * factor, num_requests=math.ceil(asked.num_requests * factor))


def _with_adapters(asked: Asked, num_adapters: int) -> Asked:
    return replace(asked, work=replace(asked.work, num_adapters=num_adapters))


def _for(asked: Asked, shape: Shape) -> Shape:
    """Return a shape with the adapters of a load."""
    return replace(shape, settings=changed(shape.settings, {REGISTRY: plan_registry(asked.work)}))


_MOST_OTHERS = 5
"""Shapes beside the answer that are offered."""


def around(search: Search, jobs: int, watch: Watch = lambda _what, _met: None) -> None:
    """Simulate what surrounds the answer: clusters for less and more money, and the answer under another load.

    Args:
        search: that found something; to fill.
        jobs: runs at a time.
        watch: called after each run.
    """
    answer, asked = search.answer, search.asked
    assert answer.shape is not None
    assert asked is not None
    clusters, loads = list(_offered(answer)), list(_varied(asked))
    tasks = [(asked, (shape, number, SEED, False)) for shape, number in clusters]
    tasks += [(load, (_for(load, answer.shape), answer.num_replicas, SEED, False)) for _, load in loads]
    names = [*(f"{number} x {shape.name}" for shape, number in clusters), *(what for what, _ in loads)]
    trials = []
    with _runner(jobs) as run_all:
        for name, trial in zip(names, run_all(tasks), strict=True):
            trials.append(trial)
            watch(name, trial.met)
    offers = [Offer(shape, trial) for (shape, _), trial in zip(clusters, trials, strict=False)]
    search.around = Around(
        offers, [(what, trial) for (what, _), trial in zip(loads, trials[len(offers) :], strict=True)]
    )


def _offered(answer: Answer) -> Iterator[tuple[Shape, int]]:
    """Yield clusters to compare with the answer: its shape in other numbers, and others for about as much money."""
    chosen, number = answer.shape, answer.num_replicas
    assert chosen is not None
    numbers = {*range(max(number - 2, 1), number + 3), math.ceil(1.5 * number), 2 * number}
    yield from ((chosen, one) for one in sorted(numbers))
    others: dict[tuple[str, int], Rejected] = {}
    for one in answer.rejected:
        kind = one.shape.gpu, one.shape.num_gpus
        if one.trial is not None and not one.trial.in_vain and kind != (chosen.gpu, chosen.num_gpus):
            others.setdefault(kind, one)
    paid = answer.usd_per_hour
    for one in list(others.values())[:_MOST_OTHERS]:
        replicas = number * chosen.num_gpus / one.shape.num_gpus
        if paid is not None and one.shape.usd_per_hour is not None:
            replicas = paid / one.shape.usd_per_hour
        yield from ((one.shape, most) for most in sorted({max(round(replicas * part), 1) for part in (1.0, 1.5, 2.0)}))


def _varied(asked: Asked) -> Iterator[tuple[str, Asked]]:
    """Yield other loads, and in words how they differ."""
    work = asked.work
    for percent in (-20, -10, 10, 20):
        yield f"{percent:+} % requests/s", _busier(asked, 1 + percent / 100)
    low, high = work.prompt
    yield "+20 % prompt tokens", replace(asked, work=replace(work, prompt=(_more(low), _more(high))))
    low, high = work.output
    yield "+20 % output tokens", replace(asked, work=replace(work, output=(_more(low), _more(high))))
    if work.num_adapters:
        yield "+50 % adapters, requests/s as before", _with_adapters(asked, math.ceil(work.num_adapters * 1.5))


def _more(tokens: int) -> int:
    return math.ceil(tokens * 1.2)


@contextmanager
def _runner(jobs: int) -> Iterator[RunAll]:
    """Yield what runs tasks, in this process or several; leaving it ends these."""
    if jobs == 1:
        yield partial(map, _run)
        return
    with ProcessPoolExecutor(jobs, get_context(START_METHOD), _ignore_interrupts) as processes:
        try:
            yield partial(processes.map, _run)
        finally:
            processes.shutdown(cancel_futures=True)


def _ignore_interrupts() -> None:
    """Leave Ctrl-C, which a terminal sends to all processes of a command, to the first one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _num_requests(rate: float, e2e: float) -> int:
    """Return the default number of requests of a run.

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
