"""Finds the fewest replicas that serve a workload within a service level.

Each trial is a whole simulated run, so few are made. The first guess is the throughput of one replica kept busy; it is
simulated too, and cheap, with the requests of one replica instead of all. From there the search goes in steps of 1, 2,
4 ... (with many replicas: from a sixteenth of the guess on) until one number meets the level and one misses it, then by
bisection until the two are neighbours. It assumes that any number above one that meets the level meets it too, and
stops where every request fails, the first of an idle cluster included.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from lorrery.loadgen.options import LoadOptions
from lorrery.service.settings.cluster import Settings, changed
from lorrery.service.settings.sections import LONGEST_SECONDS
from lorrery.simulator.options import SimulationOptions
from lorrery.simulator.run import SimulatedRun
from lorrery.vocabulary.units import LAST_SECONDS

__all__ = ["Trial", "Watch", "busy_rate", "fewest", "search", "try_replicas"]

BUSY_STREAMS = 1_000
"""Streams that keep a replica busy: more would only make the run longer."""
BUSY_ROUNDS, BUSY_REQUESTS = 4, 200
"""Requests of such a run: per stream, and in total at least."""
LETS_ALL_WAIT: dict[str, object] = {
    "scheduler.max_waiting_requests_per_tenant": None,
    "scheduler.deadline_admission": False,
    "scheduler.start_within_seconds": None,
    "scheduler.first_token_slo_seconds": LONGEST_SECONDS,
}
"""For a run that begins with all its streams at once: no request may be refused or dropped."""

OF_LOAD = {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
"""Statuses with which even the first request of an idle cluster may fail because of those that follow."""

Watch = Callable[[int], None]
"""Called with the number of replicas of each trial before it runs."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulated run, and whether it met the level.

    Attributes:
        num_replicas: that served it.
        ttft_p99: seconds from arrival to first token, waiting included; None if no request completed.
        tpot_p99: seconds per further token, likewise.
        num_failed: requests that were refused, dropped or timed out.
        met: whether it met the level; a failed request counts as a miss.
        failure: how most of them failed, and the first message; empty if none did.
        in_vain: whether every request failed, and would on any number of replicas.
    """

    num_replicas: int
    ttft_p99: float | None
    tpot_p99: float | None
    num_failed: int
    met: bool
    failure: str = ""
    in_vain: bool = False


def busy_rate(settings: Settings, options: LoadOptions, streams: int) -> tuple[float, float]:
    """Simulate a replica that is never idle; return its requests per second and their TPOT p99 in seconds.

    Limits on the number of waiting requests and on waiting time are lifted for this run.

    Args:
        settings: of the cluster.
        options: the workload; its rate and number of requests are ignored.
        streams: most concurrent requests; `BUSY_STREAMS` are enough.

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
    summary = SimulatedRun(settings, closed, SimulationOptions(workers=least)).run().summary
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
    """Simulate a workload on clusters of several sizes, until the smallest that meets a level at p99 is known.

    Args:
        settings: of the cluster.
        options: the workload.
        ttft: seconds from arrival to first token; None: no limit.
        tpot: seconds per further token; None: no limit.
        guess: replicas to begin with; the search ends at four times as many, or 16 more.
        watch: called before each trial.

    Raises:
        LorreryError: as `SimulatedRun.run`.
    """
    settings = changed(settings, {"worker.gpus": 1})  # one worker process per replica

    def run(num_replicas: int) -> Trial:
        watch(num_replicas)
        report = SimulatedRun(settings, options, SimulationOptions(workers=num_replicas)).run()
        summary = report.summary
        failure, *_ = *report.failures, ""
        if not summary.num_completed:
            in_vain = OF_LOAD.isdisjoint(summary.by_status)
            return Trial(num_replicas, None, None, summary.num_failed, met=False, failure=failure, in_vain=in_vain)
        first, further = summary.from_intended.ttft_ms.p99 / 1e3, summary.tpot_ms.p99 / 1e3
        met = summary.num_completed == summary.num_requests and not (
            (ttft is not None and first > ttft) or (tpot is not None and further > tpot)
        )
        return Trial(num_replicas, first, further, summary.num_failed, met, failure)

    least = len(settings.router.schedulers)  # each scheduler needs a worker
    guess = max(guess, least)
    return search(run, guess, least, max(4 * guess, guess + 16))


def search(run: Callable[[int], Trial], first: int, least: int, most: int) -> list[Trial]:
    """Try numbers of replicas until the smallest that meets the level is known; return the trials in order.

    Args:
        run: runs a trial with a number of replicas.
        first: where to begin, from `least` to `most`.
        least: the smallest possible number.
        most: the largest number to try. If it misses, or a trial was in vain, no number meets the level.
    """
    trials = [run(first)]
    met = first if trials[0].met else most + 1
    missed = least - 1 if trials[0].met else first
    step = max(first // 16, 1)
    while missed + 1 < met and not trials[-1].in_vain:
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
