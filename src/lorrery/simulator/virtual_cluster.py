"""`lorrery.VirtualCluster`: a simulation in lock step with a program that observes and scales it.

For testing an autoscaler: it reads what it would scrape from a live cluster, sets the number of workers, and advances
virtual time. Nothing happens between two calls, however long the program takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NoReturn

from lorrery.scheduler.core.autoscaling import METRICS, MOST_REPLICAS, Decision, Sample, Window
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.options import method_arguments_of
from lorrery.simulator.arguments import read_positive, read_whole
from lorrery.simulator.autoscaling import scaling_row
from lorrery.simulator.interface import prepare
from lorrery.simulator.loop.engine import PAUSE
from lorrery.simulator.options import Scenario
from lorrery.simulator.result import SimulationResult
from lorrery.simulator.run import SimulatedRun
from lorrery.simulator.subscribers.scrape import exposition
from lorrery.vocabulary.units import LAST_SECONDS, NEVER, PS_PER_SECOND

__all__ = ["Observation", "RunIsOverError", "VirtualCluster"]


class RunIsOverError(LorreryError):
    """The run has ended: it cannot be scaled any more and, after `result` was called, not observed either."""


@dataclass(frozen=True, slots=True)
class Observation:
    """State of a cluster at one time.

    Attributes:
        at_seconds: device seconds since the start.
        num_ready: worker processes that serve.
        num_starting: worker processes that load their weights.
        num_draining: worker processes that finish their requests and then leave.
        metrics: by name as in `[autoscaler]`: gauges and rates of the whole cluster (for the KV cache the mean use),
            percentiles in seconds. Rates and percentiles cover the last `autoscaler.window_seconds`; they are absent
            until there are two samples.
        done: every request has ended, and none will arrive.
    """

    at_seconds: float
    num_ready: int
    num_starting: int
    num_draining: int
    metrics: Mapping[str, float]
    done: bool


@dataclass(frozen=True, kw_only=True)
class _Scaled(Scenario):
    """A scenario whose workers the caller scales."""

    run: Annotated[SimulatedRun | None, "A prepared run that has not begun; replaces all other arguments."] = None


class VirtualCluster:
    """A simulated cluster that its caller scales.

    Args:
        asked: its fields are the arguments, those of `lorrery.simulate` without its observers, and `run`. Of
            `[autoscaler]` the start-up time, the window and the service level apply, and no scaling rule; each
            observation scrapes, so a scrape interval is refused. A process lost by a fault is replaced at once by one
            that starts.

    Raises:
        LorreryError: invalid settings or options.
    """

    @method_arguments_of(_Scaled)
    def __init__(self, asked: _Scaled) -> None:
        self._run = asked.run or prepare(asked)
        self._playing = self._run.begin(scaled_by_caller=True)
        assert self._playing.scaled is not None
        self._scaled = self._playing.scaled
        (self._fleet,), (self._scraper,) = self._scaled.fleets, self._scaled.scrapers
        self._simulation = self._playing.cluster.simulation
        self._start_ps = self._now_ps = self._simulation.now_ps
        self._num_shards = self._playing.cluster.view.num_shards
        self._window = Window(self._scaled.settings.window_seconds)
        self._done = False
        self._result: SimulationResult | None = None
        self._look()

    def __reduce__(self) -> NoReturn:
        """Raise: a run in progress cannot be pickled or copied."""
        raise TypeError(
            "a VirtualCluster cannot be pickled or copied; send its settings, workload and seed to the other process"
            " and make it there, or send what result() or observe() returns"
        )

    @property
    def done(self) -> bool:
        """Whether every request has ended and none will arrive."""
        return self._done

    def observe(self) -> Observation:
        """Return the current state; unchanged until time advances or the cluster is scaled."""
        self._check_goes_on()
        sample = self._scraper.sample(self._now_ps)
        metrics = {name: reading.value for name, reading in self._window.read_all(METRICS).items()}
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
            metrics[name] = sample.kv_cache_usage_perc / max(sample.num_ready, 1)
        return Observation(
            sample.at_seconds, sample.num_ready, sample.num_starting, sample.num_draining, metrics, self._done
        )

    def metrics(self) -> str:
        """Return the current metrics as Prometheus text under vLLM's names, as the cluster's `/metrics` would."""
        self._check_goes_on()
        return exposition(self._scraper.sample(self._now_ps), self._run.settings.served_model_names[0])

    def scale(self, num_replicas: int) -> None:
        """Set the number of worker processes: more start, which takes the start-up time, or some drain.

        Raises:
            SettingsError: a number out of range, or below the number of schedulers where there are several.
            RunIsOverError: every request has ended and none will arrive, or `result` was called.
        """
        self._check_goes_on()
        if self._done:
            raise RunIsOverError(
                f"scale to {num_replicas}: every request has ended, and none will come; look at `done` before, and ask"
                " for the result"
            )
        num_replicas = read_whole("num_replicas", num_replicas, 0)
        least = self._num_shards if self._num_shards > 1 else 0
        if not least <= num_replicas <= MOST_REPLICAS:
            raise SettingsError(f"scale to {num_replicas}: it must be from {least} to {MOST_REPLICAS} worker processes")
        fleet = self._fleet
        if num_replicas != fleet.num_replicas:
            sample = self._scraper.sample(self._now_ps)
            decision = Decision(num_replicas, num_replicas, "asked for")
            self._scaled.timeline.append(scaling_row(sample, decision, (), {}))
            fleet.scale(num_replicas)

    def advance(self, seconds: float) -> Observation:
        """Advance device time and return the state afterwards.

        Raises:
            SettingsError: not a finite, positive time, or beyond the longest simulation.
            RunIsOverError: `result` was called.
        """
        self._check_goes_on()
        seconds = read_positive("seconds to advance by", seconds)
        until_ps = self._now_ps + max(round(min(seconds, LAST_SECONDS) * PS_PER_SECOND), 1)
        if seconds > LAST_SECONDS or until_ps >= NEVER:
            raise SettingsError(f"advance by {seconds:g} s: a simulation has {LAST_SECONDS:,} s at most")
        if not self._done:
            self._simulation.tick(until_ps, self._pause)
            for request in self._playing.arriving:
                if request is PAUSE:
                    break
                self._playing.ended(request)
            else:
                self._done = True
        self._now_ps = until_ps
        self._look()
        return self.observe()

    def result(self) -> SimulationResult:
        """End the run and return its result; requests that are still open count as interrupted."""
        if self._result is None:
            self._result = SimulationResult(self._playing.report(interrupted=not self._done))
        return self._result

    def _pause(self, at_ps: int) -> int:
        del at_ps
        self._simulation.pause()
        return NEVER

    def _look(self) -> Sample:
        sample = self._scraper.sample(self._now_ps)
        self._window.add(sample)
        return sample

    def _check_goes_on(self) -> None:
        if self._result is not None:
            raise RunIsOverError("the run is over, since its result was asked for; make another VirtualCluster")
