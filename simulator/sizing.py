"""How few replicas serve a workload within a service level.

Each trial is a whole simulated run, so few are made. The first guess is what one replica ends a second while it is
kept busy, which is simulated too, and costs little: requests of one replica, not of all. From there on in steps of 1,
2, 4 ... (of many replicas: from a sixteenth of the guess on) until one number meets the level and one misses it, then
halfway between the two until they are neighbours. This takes for granted that a number above one that meets the level
meets it too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from lorrery.chassis.sections import LONGEST_SECONDS
from lorrery.loadgen.options import LoadOptions
from lorrery.settings import Settings, changed
from lorrery.simulator.run import SimulatedRun, SimulationOptions
from lorrery.vocabulary.units import LAST_SECONDS

__all__ = ["Trial", "Watch", "busy_rate", "fewest", "search", "try_replicas"]

BUSY_STREAMS = 1_000
"""That keep a replica busy: more would only make the run longer."""
BUSY_ROUNDS, BUSY_REQUESTS = 4, 200
"""Requests of such a run: so many for each stream, and at least so many."""
LETS_ALL_WAIT: dict[str, object] = {
    "scheduler.max_waiting_requests_per_tenant": None,
    "scheduler.deadline_admission": False,
    "scheduler.start_within_seconds": None,
    "scheduler.first_token_slo_seconds": LONGEST_SECONDS,
}
"""Of a run that begins with all its streams at once: what would refuse or drop some of them would leave it few."""

Watch = Callable[[int], None]
"""Told the number of replicas of each trial before it runs."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulated run, and whether it met the level.

    Attributes:
        num_replicas: that served it.
        ttft_p99: seconds from arrival to first token, waiting included.
        tpot_p99: seconds per further token.
        num_failed: requests that were refused, dropped or timed out.
        met: whether it met the level; with a failed request it did not.
    """

    num_replicas: int
    ttft_p99: float
    tpot_p99: float
    num_failed: int
    met: bool


def busy_rate(settings: Settings, options: LoadOptions, streams: int) -> tuple[float, float]:
    """Simulate a replica that is never idle; return the requests that it ends per second, and their TPOT p99, seconds.

    No bound on how many wait, or for how long, holds in this run.

    Args:
        settings: of the cluster.
        options: the workload; its rate and number of requests do not count.
        streams: requests under way at once, at most; `BUSY_STREAMS` are enough.

    Raises:
        LorreryError: as `SimulatedRun.run`.
    """
    least = len(settings.router.schedulers)
    streams = min(streams, BUSY_STREAMS) * least
    settings = changed(settings, {"worker.gpus": 1, "scheduler.max_waiting_requests": streams, **LETS_ALL_WAIT})
    num_requests = max(BUSY_ROUNDS * streams, BUSY_REQUESTS)
    closed = replace(
        options, rate=LoadOptions().rate, concurrency=streams, num_requests=num_requests, timeout=LAST_SECONDS
    )
    summary = SimulatedRun(settings, closed, SimulationOptions(least)).run().summary
    return summary.requests_per_second / least, summary.tpot_ms.p99 / 1e3


def try_replicas(
    settings: Settings,
    options: LoadOptions,
    *,
    ttft: float | None,
    tpot: float | None,
    guess: int,
    watch: Watch = lambda _num_replicas: None,
) -> list[Trial]:
    """Simulate a workload on clusters of several sizes, until the smallest is known that meets a level at p99.

    Args:
        settings: of the cluster.
        options: the workload.
        ttft: seconds from arrival to first token; None: as many as it takes.
        tpot: seconds per further token; None: as many as it takes.
        guess: replicas to begin with; the search ends at four times as many, or 16 more.
        watch: told of each trial.

    Raises:
        LorreryError: as `SimulatedRun.run`.
    """
    settings = changed(settings, {"worker.gpus": 1})  # a worker process for each replica

    def run(num_replicas: int) -> Trial:
        watch(num_replicas)
        summary = SimulatedRun(settings, options, SimulationOptions(num_replicas)).run().summary
        first, further = summary.from_intended.ttft_ms.p99 / 1e3, summary.tpot_ms.p99 / 1e3
        met = summary.num_completed == summary.num_requests and not (
            (ttft is not None and first > ttft) or (tpot is not None and further > tpot)
        )
        return Trial(num_replicas, first, further, summary.num_failed, met)

    least = len(settings.router.schedulers)  # each has a worker at least
    guess = max(guess, least)
    return search(run, guess, least, max(4 * guess, guess + 16))


def search(run: Callable[[int], Trial], first: int, least: int, most: int) -> list[Trial]:
    """Try numbers of replicas until the smallest that meets the level is known; return the trials in order.

    Args:
        run: makes a trial with so many replicas.
        first: where to begin, from `least` to `most`.
        least: the smallest number that can be.
        most: the largest number worth trying. If it misses, nothing met the level.
    """
    trials = [run(first)]
    met = first if trials[0].met else most + 1
    missed = least - 1 if trials[0].met else first
    step = max(first // 16, 1)
    while missed + 1 < met:
        if missed < least:
            number = max(met - step, least)
        elif met > most:
            number = min(missed + step, most)
        else:
            number = (missed + met) // 2
        step *= 2
        trials.append(run(number))
        if trials[-1].met:
            met = number
        else:
            missed = number
    return trials


def fewest(trials: list[Trial]) -> int | None:
    """Return the smallest number of replicas that met the level; None if none did."""
    return min((trial.num_replicas for trial in trials if trial.met), default=None)
