"""Where a request would end first among many workers, without a look at each: the order that `predicted_finish` needs.

Most of a worker's finish (`core.forecast.finish_ps`) is the time of the decode steps to come, which grows with the
request in the same way at every worker of one pace. So each worker has a *rate*, a lower bound on the time of a further
output token there (in picoseconds, times `ONE`), from figures of the worker alone:

    rate   = ((base + sequence x (running + waiting + 1) + kv_token x (KV tokens + waiting tokens)) / (1 - prompts)
              + blocked) x least slowdown
    blocked = (waiting + 1) x (base + sequence x running + kv_token x KV tokens) / running
              of a worker whose waiting sequences could not start, else 0
    finish >= ((output - 1) x rate + (base + prompt_token x computed input + (output - 1) x kv_token x own tokens)
              x least slowdown) / ONE

Workers of one pace are kept in order of their rates; ties by the slowdown in the rate, then by number. A request
evaluates them in this order, until the bound of the next, with the least slowdown of any worker, is above the best two
finishes found; the second one goes into the decision log as the next best. Workers whose own bound is above the two are
skipped.

A bound holds while the worker's batch and queue stay the same: KV tokens then only grow, step by step, and the slowdown
that counts lies between the last and the usual one, of which the bound takes the smaller. All other changes are
reported to `ManyWorkers` (`touch`); the rate is recomputed then, and when an evaluation finds that the tokens have
grown. What the bound leaves out costs evaluations, not exactness: mainly the wait for prompts. The load time of the
adapter, as far as it exceeds the wait of a blocked worker, and the cached part of the prompt are counted per worker,
for those whose rate is low enough.

Cost, for n workers: O(log n), and moves of n / 2 words, for each rate that changes; few evaluations if rates differ by
more than what is left out, and all n for a request with one output token.
"""

from typing import TYPE_CHECKING, Final

from lorrery.scheduler.core.candidates import ReplicaCandidate
from lorrery.scheduler.core.forecast import LEAST_DECODING, ONE
from lorrery.vocabulary.machine_ints import bisect_left, bisect_left_within, product
from lorrery.worker.device.pace import Pace

if TYPE_CHECKING:
    from mypy_extensions import i64

NUMBER_BITS: Final = 24
NUMBERS: Final = (1 << NUMBER_BITS) - 1
_MOST_RATE: Final = (1 << 61) - 1
_MOST_SLOWDOWN: Final = (1 << 37) - 1
"""Limits of a machine integer; a value cut off at them is still a lower bound."""


class OfOnePace:
    """The workers of one pace, in order.

    Attributes:
        pace: of all of them.
        rates: ascending.
        workers: parallel to `rates`: the slowdown in the rate, and the worker's number, in one integer.
    """

    __slots__ = ("pace", "rates", "workers")

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.rates: list[i64] = []
        self.workers: list[i64] = []

    def put(self, rate: int, worker: int) -> None:
        """Add a worker with its rate."""
        place = self._place_of(rate, worker)
        self.rates.insert(place, rate)
        self.workers.insert(place, worker)

    def take(self, rate: int, worker: int) -> None:
        """Remove a worker with its rate."""
        place = self._place_of(rate, worker)
        del self.rates[place]
        del self.workers[place]

    def behind_alike(self, place: int) -> int:
        """Return the first place after all workers with the rate and slowdown of the one at `place`."""
        return self._place_of(self.rates[place], self.workers[place] | NUMBERS)

    def _place_of(self, rate: int, worker: int) -> int:
        rates = self.rates
        first = bisect_left(rates, rate)
        if first == len(rates) or rates[first] != rate:
            return first
        return bisect_left_within(self.workers, worker, first, bisect_left(rates, rate + 1))


class FinishOrder:
    """See the module.

    Args:
        candidates: the workers, by number; they and their paces do not change.

    Attributes:
        groups: the workers by pace.
        blocked_ps: by number, a blocked worker's part of the rate: how long a request waits there for each of its
            output tokens.
    """

    __slots__ = ("_candidates", "_group_of", "_kv_tokens", "_rates", "_slowdowns", "_workers", "blocked_ps", "groups")

    def __init__(self, candidates: tuple[ReplicaCandidate, ...]) -> None:
        self._candidates = candidates
        by_pace: dict[Pace, OfOnePace] = {}
        self._group_of: list[OfOnePace] = []
        self._rates: list[i64] = []
        self._workers: list[i64] = []  # as in the group
        self._kv_tokens: list[i64] = []  # those counted in the rate
        self.blocked_ps: list[int] = [0] * len(candidates)
        self._slowdowns = _Least(len(candidates))
        for number, candidate in enumerate(candidates):
            pace = candidate.forecast.pace
            group = by_pace.get(pace)
            if group is None:
                group = by_pace[pace] = OfOnePace(pace)
            self._group_of.append(group)
            self._rates.append(0)
            self._workers.append(number)
            self._kv_tokens.append(0)
            group.put(0, number)
            self.note(number)
        self.groups = list(by_pace.values())

    @property
    def least_slowdown(self) -> int:
        """A lower bound of the slowdown of any worker."""
        return self._slowdowns.least

    def note(self, number: int) -> None:
        """Recompute a worker's rate."""
        self._make(number, self._candidates[number].least_kv_tokens)

    def looked_at(self, number: int) -> None:
        """Recompute the rate of a worker that has just been brought up to date, if its KV tokens changed."""
        kv_tokens = self._candidates[number].shown_kv_tokens
        if kv_tokens != self._kv_tokens[number]:
            self._make(number, kv_tokens)

    def _make(self, number: int, kv_tokens: int) -> None:
        candidate = self._candidates[number]
        forecast = candidate.forecast
        slowdown = max(min(forecast.slowdown, forecast.usual_slowdown, _MOST_SLOWDOWN), 1)
        self._slowdowns.note(number, slowdown)
        base_ps, sequence_ps, kv_token_ps, _ = forecast.pace
        num_running, num_waiting = candidate.num_running, candidate.num_waiting
        step_ps = base_ps + (num_running + num_waiting + 1) * sequence_ps
        step_ps += product(kv_tokens + forecast.waiting_tokens, kv_token_ps)
        decoding_ps = product(step_ps, ONE) // max(ONE - forecast.prompt_share, LEAST_DECODING)
        blocked_ps = 0
        if num_waiting and num_running and candidate.is_blocked:
            running_ps = base_ps + num_running * sequence_ps + product(kv_tokens, kv_token_ps)
            blocked_ps = product(num_waiting + 1, running_ps) // num_running
            decoding_ps += blocked_ps
        self.blocked_ps[number] = blocked_ps
        rate, worker = min(product(decoding_ps, slowdown), _MOST_RATE), slowdown << NUMBER_BITS | number
        self._kv_tokens[number] = kv_tokens
        if rate != self._rates[number] or worker != self._workers[number]:
            group = self._group_of[number]
            group.take(self._rates[number], self._workers[number])
            group.put(rate, worker)
            self._rates[number], self._workers[number] = rate, worker


class _Least:
    """A lower bound on the least of some changing values; made exact again after as many notes as there are values."""

    __slots__ = ("_num_notes", "_values", "least")

    def __init__(self, num: int) -> None:
        self.least = ONE
        self._values = [ONE] * num
        self._num_notes = 0

    def note(self, number: int, value: int) -> None:
        """Record a changed value."""
        self._values[number] = value
        self.least = min(self.least, value)
        self._num_notes += 1
        if self._num_notes > len(self._values):
            self._num_notes = 0
            self.least = min(self._values)
