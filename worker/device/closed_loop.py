"""The steady state of b streams in a closed loop: each sends a request when the last is answered, evenly spread.

Every stream has P prompt and O output tokens: D = O - 1 decode steps. Time is counted in steps first. In a step k
requests end on average, and as many begin; each is there for D steps, S of its own prompt, and W in which it waits. n
streams decode (Little's law), and a is the share of the others:

    k (D + S + W) = b        n = k D        a = (b - 1) / b

k is found by bisection. step(n, N) below is the step-time model's, of n decodes at context P + O/2 and N prompts; T the
most tokens of a step with prompts; E the mean over N, which is Poisson of mean k a.

*Beside* the decodes (chunked, mixed). A prompt takes z = P / (T - a n) steps' budget; if it may not be cut 1 / floor((T
- a n) / P), or D + 1 where that is nothing. It waits for the step under way, and in a queue for the budget, of which u
is used:

    S    = max(1, ceil z)                 W = 1 + z u / 2 / (1 - u)        u = k a z
    TPOT = E step(n, N)                   TTFT = E step(a n, 1 + N) + W TPOT
    z > 1: TPOT = step(n, 0) + k a sum over pieces of (step(n, piece) - step(n, 0)), and TTFT has the sum over pieces

If a step is decided when the one before it begins (`ahead`), W is one step more.
The part of N beyond the budget goes into other steps, at the same time per token. W is longer if b prompts in full
steps, and one step, would otherwise take the GPU more time than a stream's E2E.

*First* (continuous, prefill first). N prompts take wave(N), as many steps as T requires, before decoding goes on. An
end takes effect one step later; in that step all decode, or prompts are prefilled for those that ended the step before:

    S    = 0                              W = 1 / (1 + p)        p = 1 - exp(-a b / D), that a decode step ends any
    TPOT = step(n, 0) + ((D - 1) E wave(N) + what is left of its own wave after its first token) / D
    TTFT = wave(1 + N) up to its first token + W (step(n, 0) + E wave(N))

*Spaced* (S-LoRA's loop). A wave comes B decode steps after the last one, or when a sequence ends after that; c apart:

    S    = 0        c = B + (1 / k + 1) exp(-B k)        z = c / floor(T / P)        u = k a z
    W    = (k B (B + 1) / 2 + exp(-B k)) / (k c) + z u / 2 / (1 - u)
    TPOT = step(n, 0) + ((D + W) / c - 1) wave(k c) / (D + W)        TTFT = wave(k c) + W TPOT

*Rounds* (static; spaced, if D <= B). Sequences that join together end together, in r = ceil(b / floor(T / P)) rounds:

    TPOT = step(b / r, 0)                 E2E = r (wave(b / r) + D TPOT)

A single stream (a = 0) does not wait, W = 0. `tests/simulator/test_plan_closed_loop.py` compares all this with `lorrery
simulate -c b`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from math import ceil, exp, floor, inf, sqrt

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
"""Shape (parts,): seconds by part. All formulas are linear in them."""
Pieces = tuple[tuple[int, int], ...]
"""(new tokens, tokens before them) of each chunk of a prompt in a step."""
StepSeconds = Callable[[int, Pieces], Seconds]
"""Seconds of a step, given its number of decodes and its chunks."""

_MOST_TERMS_MEAN = 12
"""Above this mean a Poisson number is its mean plus or minus its standard deviation: a step is linear there."""
_HALVINGS = 60
_ROUNDING = 1e-9


class Turns(Enum):
    """When prompts are computed."""

    BESIDE = auto()
    FIRST = auto()
    SPACED = auto()
    ROUNDS = auto()


@dataclass(frozen=True, slots=True)
class PromptTurns:
    """How prompts and decodes share a replica's steps.

    Attributes:
        turns: when prompts are computed.
        step_tokens: token budget of a step with prompts; decodes count only if they are in the same step.
        in_pieces: whether a prompt may be cut where the budget ends.
        decode_steps: minimum between two prefills, for `SPACED`.
        ahead: whether a step is decided when the one before it begins, for `BESIDE`.
    """

    turns: Turns
    step_tokens: int
    in_pieces: bool = False
    decode_steps: int = 0
    ahead: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LoopTimes:
    """Mean times of one stream.

    Attributes:
        ttft: seconds from its request to its first token, by part.
        tpot: seconds from one token to the next, by part.
        decoding: streams that decode; the others wait or prefill.
    """

    ttft: Seconds
    tpot: Seconds
    decoding: float


class ClosedLoop:
    """The formulas above.

    Args:
        step: durations of steps.
        turns: how prompts share them.
        prompt_tokens: of each request.
        output_tokens: of each request, at least 2.
    """

    def __init__(self, step: StepSeconds, turns: PromptTurns, prompt_tokens: int, output_tokens: int) -> None:
        self._step, self._turns = step, turns
        self._prompt, self._decodes = prompt_tokens, output_tokens - 1

    def at(self, streams: int) -> LoopTimes:
        """Return the mean times of each of `streams` streams."""
        match self._turns.turns:
            case Turns.BESIDE:
                return self._beside(streams)
            case Turns.FIRST:
                return self._first(streams)
            case Turns.SPACED if streams > 1 and self._decodes > self._turns.decode_steps:
                return self._spaced(streams)
            case _:
                return self._rounds(streams)

    def alone(self, prompt_tokens: int) -> Seconds:
        """Return the seconds of the steps of one prompt alone on the GPU."""
        return sum((self._step(0, (piece,)) for piece in self._cut(prompt_tokens, 0)), self._nothing)

    @property
    def _nothing(self) -> Seconds:
        return np.zeros_like(self._step(1, ()))

    # --- beside the decodes -----------------------------------------------------------------------------------------

    def _beside(self, streams: int) -> LoopTimes:
        others = (streams - 1) / streams

        def life(rate: float) -> float:
            line = _line(self._budget_steps(rate, others), rate, others)
            return self._decodes + self._own_steps(rate, others) + (streams > 1) * (1 + self._turns.ahead) + line

        rate = _rate(streams, self._decodes, life)
        decoding = rate * self._decodes
        waited = max(0.0, streams / rate - self._decodes - self._own_steps(rate, others))
        num, beside = max(1, round(decoding)), round(decoding * others)
        room = max(1, self._turns.step_tokens - num)
        base = self._step(num, ())
        if self._turns.in_pieces and room < self._prompt:
            pieces = self._cut(self._prompt, num)
            tpot = base + rate * others * sum((self._step(num, (piece,)) - base for piece in pieces), self._nothing)
            own = sum((self._step(beside, (piece,)) for piece in self._cut(self._prompt, beside)), self._nothing)
            least = (self._step(num, ((room, 0),)) - base) * self._prompt / room
        else:
            most = room / self._prompt if self._turns.in_pieces else float(max(1, room // self._prompt))
            tpot, own, beyond = self._nothing, self._nothing, 0.0
            for number, weight in _poisson(rate * others):
                tpot = tpot + weight * self._joined(num, min(number, most))
                own = own + weight * self._joined(beside, min(1 + number, most))
                beyond += weight * max(0.0, number - most)
            if beyond:
                tpot = tpot + beyond / most * (self._joined(num, most) - base)
            together = min(most, float(streams))
            least = (self._joined(num, together) - base) / together
        if streams > 1:
            missing = float((streams * least + base - own - (waited + self._decodes) * tpot).sum())
            waited += max(0.0, missing) / float(tpot.sum())
        return LoopTimes(own + waited * tpot, tpot, decoding)

    def _budget_steps(self, rate: float, others: float) -> float:
        """Return how many steps' budget a prompt takes beside the others' decodes, at `rate` requests per step."""
        room = self._turns.step_tokens - rate * others * self._decodes
        if self._turns.in_pieces:
            return self._prompt / room if room > 0 else inf
        # A prompt that does not fit beside the decodes waits until they have ended.
        return 1 / max(floor(room / self._prompt), 1 / (self._decodes + 1))

    def _own_steps(self, rate: float, others: float) -> float:
        if not self._turns.in_pieces:
            return 1
        steps = self._budget_steps(rate, others)
        return max(1, ceil(steps - _ROUNDING)) if steps < inf else inf

    def _joined(self, num_decodes: int, prompts: float) -> Seconds:
        """Return a step with `prompts` prompts; a fraction is cut off a prompt if allowed, else interpolated."""
        whole = floor(prompts + _ROUNDING)
        part = prompts - whole
        pieces: Pieces = ((self._prompt, 0),) * whole
        if self._turns.in_pieces:
            rest = round(part * self._prompt)
            return self._step(num_decodes, (*pieces, (rest, 0)) if rest else pieces)
        less = self._step(num_decodes, pieces)
        if part < _ROUNDING:
            return less
        return less + part * (self._step(num_decodes, (*pieces, (self._prompt, 0))) - less)

    # --- alone ------------------------------------------------------------------------------------------------------

    def _first(self, streams: int) -> LoopTimes:
        others, decodes = (streams - 1) / streams, self._decodes
        waited = (streams > 1) / (2 - exp(-others * streams / decodes))
        rate = streams / (decodes + waited)
        base = self._step(max(1, round(rate * decodes)), ())
        foreign, wave, own = self._nothing, self._nothing, self._nothing
        for number, weight in _poisson(rate * others):
            foreign = foreign + weight * self._wave(number)
            whole = weight * self._wave(1 + number)
            wave, own = wave + whole, own + whole * self._middle(1 + number)
        tpot = base + ((decodes - 1) * foreign + wave - own) / decodes
        return LoopTimes(own + waited * (base + foreign), tpot, rate * decodes)

    def _spaced(self, streams: int) -> LoopTimes:
        decodes, least = self._decodes, self._turns.decode_steps
        most = max(1, self._turns.step_tokens // self._prompt)
        others = (streams - 1) / streams

        def apart(rate: float) -> float:
            return least + (1 / rate + 1) * exp(-least * rate)

        def life(rate: float) -> float:
            held = (rate * least * (least + 1) / 2 + exp(-least * rate)) / (rate * apart(rate))
            return decodes + held + _line(apart(rate) / most, rate, others)

        rate = _rate(streams, decodes, life)
        there = streams / rate
        waited = there - decodes
        wave = self._wave(min(most, rate * apart(rate)))
        foreign = max(0.0, there / apart(rate) - 1) / there
        base = self._step(max(1, round(rate * decodes)), ())
        tpot = base + foreign * wave
        return LoopTimes(wave + waited * tpot, tpot, rate * decodes)

    def _rounds(self, streams: int) -> LoopTimes:
        rounds = ceil(streams / max(1, self._turns.step_tokens // self._prompt))
        together = streams / rounds
        tpot = self._step(round(together), ())
        e2e = rounds * (self._wave(together) + self._decodes * tpot)
        return LoopTimes(e2e - self._decodes * tpot, tpot, together)

    def _wave(self, prompts: float) -> Seconds:
        """Return the time of the steps that compute `prompts` prompts without decodes."""
        budget = self._turns.step_tokens
        if self._turns.in_pieces:
            if prompts * self._prompt <= budget:
                return self._alone(prompts)
            if self._prompt > budget:
                return prompts * self.alone(self._prompt)
            return prompts * self._prompt / budget * self._joined(0, budget / self._prompt)
        most = max(1, budget // self._prompt)
        full = floor(prompts / most)
        return self._alone(prompts - full * most) + (full * self._alone(most) if full else self._nothing)

    def _alone(self, prompts: float) -> Seconds:
        """Return one step of `prompts` prompts, interpolated for a fraction."""
        whole = floor(prompts + _ROUNDING)
        part = prompts - whole
        less = self._step(0, ((self._prompt, 0),) * whole) if whole else self._nothing
        if part < _ROUNDING:
            return less
        return less + part * (self._step(0, ((self._prompt, 0),) * (whole + 1)) - less)

    def _middle(self, prompts: float) -> float:
        """Return the fraction of a wave that has passed at the mean end of its prompts."""
        budget = self._turns.step_tokens
        if self._prompt > budget:
            return (prompts + 1) / (2 * prompts)
        most = budget / self._prompt if self._turns.in_pieces else budget // self._prompt
        steps = max(1, ceil(prompts / most - _ROUNDING))
        return (steps + 1) / (2 * steps)

    def _cut(self, prompt_tokens: int, num_decodes: int) -> Iterator[tuple[int, int]]:
        """Yield the chunks of a prompt beside `num_decodes` decodes."""
        most = prompt_tokens
        if self._turns.in_pieces:
            beside = num_decodes if self._turns.turns is Turns.BESIDE else 0
            most = max(1, self._turns.step_tokens - beside)
        for past in range(0, prompt_tokens, most):
            yield min(most, prompt_tokens - past), past


def _rate(streams: int, decodes: int, life: Callable[[float], float]) -> float:
    """Return the requests per step at which rate x life(rate), which is increasing, is the number of streams."""
    low, high = 0.0, streams / decodes
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle * life(middle) < streams:
            low = middle
        else:
            high = middle
    return low


def _line(steps: float, rate: float, others: float) -> float:
    """Return the steps waited for a server of fixed service time; infinite if it is overloaded."""
    used = steps * rate * others
    return steps * used / 2 / (1 - used) if used < 1 else inf


def _poisson(mean: float) -> Iterator[tuple[float, float]]:
    """Yield (number, weight) of a Poisson distribution; the weights add up to 1."""
    if mean > _MOST_TERMS_MEAN:
        yield mean - sqrt(mean), 0.5
        yield mean + sqrt(mean), 0.5
        return
    weight, rest = exp(-mean), 1.0
    for number in range(ceil(mean + 6 * sqrt(mean)) + 1):
        yield float(number), weight
        rest -= weight
        weight *= mean / (number + 1)
    if rest > 0:
        yield mean, rest
