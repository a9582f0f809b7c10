"""Simple synthetic workloads (an arrival process, uniform lengths), and changes to any workload: timing and rounds.

Times are seconds from the start. Poisson and gamma processes begin with a gap, the constant one at 0.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, islice

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.columns import WorkloadColumns
from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.vocabulary.units import LAST_SECONDS

MOST_FACTOR, LEAST_SHARE = 1e6, 1e-6
"""Limits for bursts."""

MOST_BURSTS = 10_000_000
"""In one workload; they are drawn one by one."""


def poisson(rate: float, num_requests: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw arrival times with exponential gaps of mean 1 / rate; shape (num_requests,), not decreasing.

    Raises:
        ValueError: rate not above 0.
    """
    return gamma(rate, 1.0, num_requests, rng)


def gamma(rate: float, cv: float, num_requests: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw arrival times with gamma gaps of mean 1 / rate and coefficient of variation cv; shape (num_requests,).

    cv = 1 is Poisson, above 1 is bursty, towards 0 is even.

    Raises:
        ValueError: rate or cv not above 0.
    """
    if not (rate > 0 and cv > 0):
        raise ValueError(f"rate is {rate}, cv is {cv}; both must be above 0")
    return np.cumsum(rng.gamma(1 / (cv * cv), cv * cv / rate, num_requests))


@dataclass(frozen=True, slots=True)
class Bursts:
    """The two states of a Markov-modulated Poisson process: calm and burst, each of exponential length.

    With R the rate over all, p the share and F the factor, calm times have the rate R / (1 - p + p F) and bursts F
    times that; a burst lasts `burst_seconds` on average, a calm time `burst_seconds` * (1 - p) / p.

    Attributes:
        factor: F, the rate in a burst over that in calm times, 1 to `MOST_FACTOR`.
        burst_seconds: above 0, at most `LAST_SECONDS`.
        share: p, of the time in bursts, `LEAST_SHARE` to less than 1.
    """

    factor: float
    burst_seconds: float
    share: float = 0.1

    def __post_init__(self) -> None:
        is_possible = 1 <= self.factor <= MOST_FACTOR and 0 < self.burst_seconds <= LAST_SECONDS
        if not (is_possible and LEAST_SHARE <= self.share < 1):
            raise ValueError(
                f"factor is {self.factor:g} (1 to {MOST_FACTOR:,.0f}), for {self.burst_seconds:g} (above 0, at most"
                f" {LAST_SECONDS:,}), share {self.share:g} ({LEAST_SHARE:g} to less than 1)"
            )

    @property
    def calm_seconds(self) -> float:
        """Mean duration of a calm period."""
        return self.burst_seconds * (1 - self.share) / self.share

    def rates(self, rate: float) -> tuple[float, float]:
        """Return the rates in calm periods and in bursts that give `rate` overall."""
        calm = rate / (1 - self.share + self.share * self.factor)
        return calm, self.factor * calm

    def dispersion(self, rate: float) -> float:
        """Return the long-run ratio of the variance of the number of arrivals to its mean; 1 for a Poisson process.

        1 + 2 p (1 - p) (burst rate - calm rate)^2 / (R (1 / burst seconds + 1 / calm seconds)); Fischer and
        Meier-Hellstern, "The Markov-modulated Poisson process (MMPP) cookbook", 1993.
        """
        calm, burst = self.rates(rate)
        changes = 1 / self.burst_seconds + 1 / self.calm_seconds
        return 1 + 2 * self.share * (1 - self.share) * (burst - calm) ** 2 / (rate * changes)


def mmpp(rate: float, bursts: Bursts, num_requests: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw arrival times of a Poisson process that alternates between calm and burst rate; shape (num_requests,).

    Arrivals of rate 1 are stretched by the inverse of the rate's integral, which is exact. The first state is drawn by
    its share of the time.

    Raises:
        ValueError: rate not above 0.
    """
    if not rate > 0:
        raise ValueError(f"rate is {rate}; it must be above 0")
    expected_bursts = num_requests / rate / (bursts.burst_seconds + bursts.calm_seconds)
    if expected_bursts > MOST_BURSTS:
        raise ValueError(
            f"bursts of {bursts.burst_seconds:g} s come {expected_bursts:,.3g} times in {num_requests:,} requests at"
            f" {rate:g}/s; at most {MOST_BURSTS:,} can be drawn: make them longer, or let fewer requests come faster"
        )
    due = np.cumsum(rng.exponential(1.0, num_requests))
    at_seconds = np.zeros(num_requests)
    second, expected, num_placed = 0.0, 0.0, 0
    first = int(rng.random() < bursts.share)
    means = np.array([(bursts.calm_seconds, bursts.burst_seconds)[(first + odd) % 2] for odd in (0, 1)])
    rates = np.array([bursts.rates(rate)[(first + odd) % 2] for odd in (0, 1)])
    while num_placed < num_requests:
        lengths = (rng.exponential(1.0, (256, 2)) * means).ravel()  # an even number, so that states keep alternating
        seconds = np.concatenate(([second], second + np.cumsum(lengths)))
        counts = np.concatenate(([expected], expected + np.cumsum(lengths * np.tile(rates, 256))))
        second, expected = float(seconds[-1]), float(counts[-1])
        end = int(np.searchsorted(due, expected))
        at_seconds[num_placed:end] = np.interp(due[num_placed:end], counts, seconds)
        num_placed = end
    return at_seconds


def constant(rate: float, num_requests: int) -> npt.NDArray[np.float64]:
    """Return arrival times 0, 1 / rate, 2 / rate ...; shape (num_requests,).

    Raises:
        ValueError: rate not above 0.
    """
    if not rate > 0:
        raise ValueError(f"rate is {rate}; it must be above 0")
    return np.arange(num_requests, dtype=np.float64) / rate


def synthetic(
    at_seconds: npt.NDArray[np.float64],
    input_range: tuple[int, int],
    output_range: tuple[int, int],
    rng: np.random.Generator,
) -> WorkloadColumns:
    """Make requests of the given times with lengths uniform over [low, high]; low = high is a fixed length.

    Unlike S-LoRA's generator, `high` is included.

    Raises:
        ValueError: an empty range, or one that begins below 1.
    """
    for name, (low, high) in (("input_range", input_range), ("output_range", output_range)):
        if not 1 <= low <= high:
            raise ValueError(f"{name} is {low}:{high}; it must begin at 1 or more and not be empty")
    n = len(at_seconds)
    prompts = rng.integers(input_range[0], input_range[1], n, endpoint=True)
    outputs = rng.integers(output_range[0], output_range[1], n, endpoint=True)
    return WorkloadColumns(np.arange(n, dtype=np.int32), at_seconds, prompts, outputs)


def scale(workload: Sequence[WorkloadRequest], speed_up: float) -> Sequence[WorkloadRequest]:
    """Play the workload `speed_up` times as fast: send times and think times are divided by it.

    Raises:
        ValueError: speed_up not above 0.
    """
    if not (speed_up > 0 and math.isfinite(speed_up)):
        raise ValueError(f"speed_up is {speed_up}; it must be above 0")
    if speed_up == 1:
        return workload
    if isinstance(workload, WorkloadColumns):
        return workload.sped_up(speed_up)
    return [
        replace(
            request,
            at_seconds=request.at_seconds / speed_up,
            turn=request.turn and replace(request.turn, think_seconds=request.turn.think_seconds / speed_up),
        )
        for request in workload
    ]


def limit(
    workload: Sequence[WorkloadRequest], num_requests: int | None = None, duration_seconds: float | None = None
) -> Sequence[WorkloadRequest]:
    """Keep the first `num_requests`, and of these the ones to be sent before `duration_seconds`."""
    kept = workload if num_requests is None else workload[:num_requests]
    if duration_seconds is None:
        return kept
    if isinstance(kept, WorkloadColumns):
        return kept.where(kept.at_seconds < duration_seconds)
    return [request for request in kept if request.at_seconds < duration_seconds]


def fitting(workload: Sequence[WorkloadRequest], max_input_len: int, max_total_len: int) -> Sequence[WorkloadRequest]:
    """Keep the requests whose prompt, and prompt and output together, are within a cluster's limits (inclusive).

    A session is cut at its first request that is not.
    """
    if isinstance(workload, WorkloadColumns):
        prompts, outputs = workload.prompt_tokens, workload.output_tokens
        too_long = (prompts > max_input_len) | (prompts + outputs > max_total_len)
        return workload.where(~(too_long if workload.chains is None else workload.chains.from_first(too_long)))
    kept: list[WorkloadRequest] = []
    cut_session: int | None = None  # the turns of a session are adjacent
    for request in workload:
        session = None if request.turn is None else request.turn.session
        if session is not None and session == cut_session:
            continue
        if request.prompt_tokens <= max_input_len and request.prompt_tokens + request.output_tokens <= max_total_len:
            kept.append(request)
        else:
            cut_session = session
    return kept


WARMUP_CONCURRENCY = 4
"""Clients that send the warm-up."""
_WARMUP_OUTPUT_TOKENS = 16
WARMUP_FIRST_INDEX = 2**32  # beyond any workload's


def warmup_requests(workload: Sequence[WorkloadRequest], num_requests: int) -> list[WorkloadRequest]:
    """Return short copies of a workload's first requests, with prompts that the workload does not contain.

    Otherwise the run would find them in a prefix cache. A workload with fewer requests is repeated.
    """
    return [
        replace(
            request,
            index=WARMUP_FIRST_INDEX + index,
            output_tokens=min(request.output_tokens, _WARMUP_OUTPUT_TOKENS),
            hash_ids=None,
            turn=None,
        )
        for index, request in enumerate(islice(cycle(workload), num_requests))
    ]


def again_and_again(workload: Sequence[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    """Repeat a workload endlessly, with new indices and sessions and so new prompts in each round."""
    num_sessions = 1 + max((one.turn.session for one in workload if one.turn is not None), default=0)
    for position in count():
        number, row = divmod(position, len(workload))
        turn = workload[row].turn
        if turn is not None:
            turn = replace(turn, session=turn.session + number * num_sessions)
        yield replace(workload[row], index=position, turn=turn)
