"""Where a request would end first among many workers, without looking at each: the order that `predicted_finish` needs.

Of all that goes into a worker's finish (`core.forecast.finish_ps`) most is the time of the decode steps to come, and
that grows with the request alone in the same way at every worker of one pace. So each worker has a *rate*, a lower
bound of what a further output token takes there (in picoseconds, times `ONE`), from figures of the worker alone:

    rate   = (base + sequence x (running + waiting + 1) + kv_token x (KV tokens + waiting tokens))
             / (1 - prompts) x least slowdown
    finish >= ((output - 1) x rate + (base + prompt_token x computed input + (output - 1) x kv_token x own tokens)
              x least slowdown) / ONE

Workers of one pace are kept in order of their rates, of one rate in order of the slowdown in it, then by number. A
request looks at them in this order, until the bound of the next, with the least slowdown of any worker, is above the
best two finishes that it has found; the second one is what the decision log says of the next best. On the way there
those are passed over whose own bound is above the two.

A bound stays one while the worker's batch and queue stay as they are: KV tokens only become more then, by steps, and
the slowdown that counts moves between the last and the usual one, of which the bound has the lesser. Whatever else
changes, `ManyWorkers` is told (`touch`); the rate is made anew then, and when a look finds that the tokens have become
more. What the bound leaves out costs looks, not exactness: the wait for prompts above all. How long its adapter takes
to load, and how much of its prompt is cached, is counted worker by worker, for those whose rate is low enough.

Cost, for n workers: O(log n), and moves of n / 2 words, for each rate that changes; looks are few where rates differ
by more than what is left out, and all n for a request with one output token.
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
"""What a machine integer holds; less than the true figure is a lower bound, too."""


class OfOnePace:
    """The workers whose steps take the same, in order.

    Attributes:
        pace: of all.
        rates: by place; ascending.
        workers: by place: the slowdown that is in the rate, and the worker's number, in one integer.
    """

    __slots__ = ("pace", "rates", "workers")

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.rates: list[i64] = []
        self.workers: list[i64] = []

    def put(self, rate: int, worker: int) -> None:
        """Give a worker a rate."""
        place = self._place_of(rate, worker)
        self.rates.insert(place, rate)
        self.workers.insert(place, worker)

    def take(self, rate: int, worker: int) -> None:
        """Take a worker's rate from it."""
        place = self._place_of(rate, worker)
        del self.rates[place]
        del self.workers[place]

    def behind_alike(self, place: int) -> int:
        """Return the first place behind those with the same rate, and the same slowdown in it, as the one here."""
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
        candidates: the workers, by number; they stay the same, and so do their paces.

    Attributes:
        groups: the workers by pace.
    """

    __slots__ = ("_candidates", "_group_of", "_kv_tokens", "_rates", "_slowdowns", "_workers", "groups")

    def __init__(self, candidates: tuple[ReplicaCandidate, ...]) -> None:
        self._candidates = candidates
        by_pace: dict[Pace, OfOnePace] = {}
        self._group_of: list[OfOnePace] = []
        self._rates: list[i64] = []
        self._workers: list[i64] = []  # as in the group
        self._kv_tokens: list[i64] = []  # in the rate
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
        """Make a worker's rate anew."""
        self._make(number, self._candidates[number].least_kv_tokens)

    def looked_at(self, number: int) -> None:
        """Make a worker's rate anew that has just been brought up to date."""
        kv_tokens = self._candidates[number].shown_kv_tokens
        if kv_tokens != self._kv_tokens[number]:
            self._make(number, kv_tokens)

    def _make(self, number: int, kv_tokens: int) -> None:
        candidate = self._candidates[number]
        forecast = candidate.forecast
        slowdown = max(min(forecast.slowdown, forecast.usual_slowdown, _MOST_SLOWDOWN), 1)
        self._slowdowns.note(number, slowdown)
        base_ps, sequence_ps, kv_token_ps, _ = forecast.pace
        step_ps = base_ps + (candidate.load + 1) * sequence_ps
        step_ps += product(kv_tokens + forecast.waiting_tokens, kv_token_ps)
        decoding_ps = product(step_ps, ONE) // max(ONE - forecast.prompt_share, LEAST_DECODING)
        rate, worker = min(product(decoding_ps, slowdown), _MOST_RATE), slowdown << NUMBER_BITS | number
        self._kv_tokens[number] = kv_tokens
        if rate != self._rates[number] or worker != self._workers[number]:
            group = self._group_of[number]
            group.take(self._rates[number], self._workers[number])
            group.put(rate, worker)
            self._rates[number], self._workers[number] = rate, worker


class _Least:
    """The least of some values that change, or less: it is looked for anew after as many notes as there are values."""

    __slots__ = ("_num_notes", "_values", "least")

    def __init__(self, num: int) -> None:
        self.least = ONE
        self._values = [ONE] * num
        self._num_notes = 0

    def note(self, number: int, value: int) -> None:
        """Note that one has changed."""
        self._values[number] = value
        self.least = min(self.least, value)
        self._num_notes += 1
        if self._num_notes > len(self._values):
            self._num_notes = 0
            self.least = min(self._values)
