"""Where a request would end first among many workers, without looking at each: the order that `predicted_finish` needs.

Of all that goes into a worker's finish (`core.forecast.finish_ps`) most is the time of the decode steps to come, and
that grows with the request alone in the same way at every worker of one pace. So each worker has a *rate*, a lower
bound of what a further output token takes there (in picoseconds, times `ONE`), from figures of the worker alone:

    rate   = (base + sequence x (running + waiting + 1) + kv_token x (KV tokens + waiting tokens))
             / (1 - prompts) x least slowdown
    finish >= ((output - 1) x rate + (base + prompt_token x computed input + (output - 1) x kv_token x own tokens)
              x least slowdown) / ONE

Workers of one pace are kept in order of their rates, those with the same one, and the same slowdown in it, together. A
request looks at them in this order, until the bound of the next, with the least slowdown of any worker, is above the
best two finishes that it has found; the second one is what the decision log says of the next best. On the way there
those are passed over whose own bound is above the two.

A bound stays one while the worker's batch and queue stay as they are: KV tokens only become more then, by steps, and
the slowdown that counts moves between the last and the usual one, of which the bound has the lesser. Whatever else
changes, `ManyWorkers` is told (`touch`); the rate is made anew then, and when a look finds that the tokens have become
more. What the bound leaves out costs looks, not exactness: the wait for prompts above all. How long its adapter takes
to load, and how much of its prompt is cached, is counted worker by worker, for those whose rate is low enough.

Cost, for n workers: O(log n), and a move of n / 2 words, for each rate that changes; looks are few where rates differ
by more than what is left out, and all n for a request with one output token.
"""

from bisect import bisect_left, insort

from lorrery.scheduler.core.candidates import ReplicaCandidate
from lorrery.scheduler.core.forecast import LEAST_DECODING, ONE
from lorrery.vocabulary.machine_ints import product
from lorrery.worker.device.pace import Pace

Rate = tuple[int, int]
"""A worker's rate, and the slowdown that is in it."""


class OfOnePace:
    """The workers whose steps take the same: rates in order, and who has them.

    Attributes:
        pace: theirs.
        rates: different ones, ascending, each with the slowdown that is in it.
        numbers: by the same: the workers' numbers are the bits that are set.
    """

    __slots__ = ("numbers", "pace", "rates")

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.rates: list[Rate] = []
        self.numbers: dict[Rate, int] = {}

    def put(self, rate: Rate, number: int) -> None:
        """Give a worker a rate."""
        others = self.numbers.get(rate, 0)
        if not others:
            insort(self.rates, rate)
        self.numbers[rate] = others | 1 << number

    def take(self, rate: Rate, number: int) -> None:
        """Take a worker's rate from it."""
        left = self.numbers[rate] ^ 1 << number
        if left:
            self.numbers[rate] = left
        else:
            del self.numbers[rate]
            del self.rates[bisect_left(self.rates, rate)]


class FinishOrder:
    """See the module.

    Args:
        candidates: the workers, by number; they stay the same, and so do their paces.

    Attributes:
        groups: the workers by pace.
    """

    __slots__ = ("_candidates", "_group_of", "_rates", "_slowdowns", "groups")

    def __init__(self, candidates: tuple[ReplicaCandidate, ...]) -> None:
        self._candidates = candidates
        by_pace: dict[Pace, OfOnePace] = {}
        self._group_of: list[OfOnePace] = []
        self._rates: list[Rate] = []
        self._slowdowns = _Least(len(candidates))
        for number, candidate in enumerate(candidates):
            pace = candidate.forecast.pace
            group = by_pace.get(pace)
            if group is None:
                group = by_pace[pace] = OfOnePace(pace)
            self._group_of.append(group)
            rate = self._rate(number, candidate.least_kv_tokens)
            self._rates.append(rate)
            group.put(rate, number)
        self.groups = list(by_pace.values())

    @property
    def least_slowdown(self) -> int:
        """A lower bound of the slowdown of any worker."""
        return self._slowdowns.least

    def note(self, number: int) -> None:
        """Make a worker's rate anew."""
        self._set(number, self._rate(number, self._candidates[number].least_kv_tokens))

    def looked_at(self, number: int) -> None:
        """Make a worker's rate anew that has just been brought up to date."""
        self._set(number, self._rate(number, self._candidates[number].shown_kv_tokens))

    def _set(self, number: int, rate: Rate) -> None:
        before = self._rates[number]
        if rate != before:
            group = self._group_of[number]
            group.take(before, number)
            group.put(rate, number)
            self._rates[number] = rate

    def _rate(self, number: int, kv_tokens: int) -> Rate:
        candidate = self._candidates[number]
        forecast = candidate.forecast
        slowdown = max(min(forecast.slowdown, forecast.usual_slowdown), 1)
        self._slowdowns.note(number, slowdown)
        base_ps, sequence_ps, kv_token_ps, _ = forecast.pace
        step_ps = base_ps + (candidate.load + 1) * sequence_ps
        step_ps += product(kv_tokens + forecast.waiting_tokens, kv_token_ps)
        decoding_ps = product(step_ps, ONE) // max(ONE - forecast.prompt_share, LEAST_DECODING)
        return product(decoding_ps, slowdown), slowdown


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
