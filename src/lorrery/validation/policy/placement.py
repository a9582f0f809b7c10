"""Checks a placement as `lorrery validate policy --part placement` does.

Fleets of drawn size, whose workers come, go, fill and empty while requests arrive. Checked are: each answer is a
`Choice` of one of the candidates with a reason in words; the request and the candidates are not changed; and the same
requests on the same fleet with the same generator are placed equally, as a replay of a journal requires.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lorrery.scheduler.core.checked.base import original
from lorrery.scheduler.core.checked.placement import fields_of, put_back
from lorrery.scheduler.core.placements.base import Choice
from lorrery.scheduler.core.placements.candidate import PREDICTED, Figures, not_kept
from lorrery.scheduler.core.placements.table import Placement
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.scheduler.plugins import in_words
from lorrery.simulator.replay.parts import RecordedCandidate
from lorrery.validation.policy.contract import PolicyFault
from lorrery.validation.policy.drive import NeverReturnedError, until_stuck
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.steptime import Pace

_MOST_WORKERS, _MOST_REQUESTS = 6, 60
_PREDICTED = frozenset({*PREDICTED, *Pace._fields})
_ADAPTERS = (None, Adapter("adapter-0", 8), Adapter("adapter-1", 16), Adapter("adapter-2", 64))


class Worker(RecordedCandidate):
    """A candidate with drawn figures, which change with its load.

    Attributes:
        figures: by name, as in a journal.
    """

    def __init__(
        self, name: str, figures: Figures, adapters: frozenset[str], cached_tokens: int, *, is_asked_to_predict: bool
    ) -> None:
        super().__init__(name, figures)
        self._is_asked_to_predict = is_asked_to_predict
        self.figures = figures
        self._adapters = adapters
        self._cached_tokens = cached_tokens

    @property
    def load(self) -> int:
        """Number of its sequences."""
        return self.num_waiting + self.num_running

    def has_adapter(self, adapter: Adapter) -> bool:
        """Return whether it has an adapter."""
        return adapter.adapter_id in self._adapters

    def cached_tokens(self, sequence: Sequence) -> int:
        """Return how many leading tokens of a prompt are in its cache."""
        return min(self._cached_tokens, sequence.input_tokens - 1)

    def load_ps(self, adapter: Adapter) -> int:
        """Return the duration of an adapter's load."""
        return 0 if self.has_adapter(adapter) else adapter.rank * PS_PER_SECOND // 1000

    def _figure(self, name: str) -> int:
        if name in _PREDICTED and not self._is_asked_to_predict:
            raise not_kept("pace" if name in Pace._fields else name)
        return super()._figure(name)

    def move_on(self, rng: np.random.Generator) -> None:
        """Start a waiting sequence, end a running one, both or neither."""
        figures = self.figures
        if figures["num_waiting"] and rng.random() < 0.5:
            figures["num_waiting"] -= 1
            figures["num_running"] += 1
            figures["waiting_tokens"] -= figures["waiting_tokens"] // (figures["num_waiting"] + 1)
            figures["kv_tokens"] += 500
        if figures["num_running"] and rng.random() < 0.4:
            figures["num_running"] -= 1
            figures["kv_tokens"] -= figures["kv_tokens"] // (figures["num_running"] + 1)


@dataclass(frozen=True, slots=True)
class PlacementVerdict:
    """Result of a check.

    Attributes:
        num_cases: fleets that were tried.
        fault: description of the failure; empty: none.
        case: of the fault.
    """

    num_cases: int
    fault: str = ""
    case: str = ""


def check_placement(make: Callable[[np.random.Generator], Placement], *, seed: int, seconds: float) -> PlacementVerdict:
    """Try a placement until a fault is found or the time is up; at least one fleet is tried."""
    end = time.monotonic() + seconds
    number = 0
    while not number or time.monotonic() < end:
        case = f"case {number}, seed {seed}"
        try:
            first, again = until_stuck(partial(_play_twice, make, seed, number))
        except (PolicyFault, NeverReturnedError) as fault:
            return PlacementVerdict(number + 1, str(fault), case)
        except KeyboardInterrupt:  # of a person, where this is called from Python
            raise
        except BaseException as error:  # raised by the placement
            return PlacementVerdict(number + 1, f"`place` raised {in_words(error)}", case)
        number += 1
        if first != again:
            at = next(index for index, pair in enumerate(zip(first, again, strict=True)) if pair[0] != pair[1])
            return PlacementVerdict(
                number,
                f"request {at} went to {first[at]}, and to {again[at]} when all was played again with the same"
                " generator: take chance from the generator that the class is made with, and from nothing else",
                case,
            )
    return PlacementVerdict(number)


def _play_twice(
    make: Callable[[np.random.Generator], Placement], seed: int, number: int
) -> tuple[list[str], list[str]]:
    return _play(make, seed, number), _play(make, seed, number)


def _play(make: Callable[[np.random.Generator], Placement], seed: int, number: int) -> list[str]:
    """Place drawn requests on a drawn fleet; return the worker of each."""
    rng = np.random.default_rng([seed, number])
    placement: Any = original(make(np.random.default_rng([seed, number, 1])))  # whose faults are told in full here
    predicts = bool(getattr(placement, "predicts", False))
    fleet = [_worker(rng, index, predicts) for index in range(int(rng.integers(1, _MOST_WORKERS + 1)))]
    placed: list[str] = []
    for handle in range(int(rng.integers(1, _MOST_REQUESTS + 1))):
        if rng.random() < 0.1 and len(fleet) > 1:
            fleet.pop(int(rng.integers(len(fleet))))
        if rng.random() < 0.1 and len(fleet) < _MOST_WORKERS:
            fleet.append(_worker(rng, handle + _MOST_WORKERS, predicts))
        adapter = _ADAPTERS[int(rng.integers(len(_ADAPTERS)))]
        prompt, most = int(rng.integers(1, 4_000)), int(rng.integers(1, 1_000))
        sequence = Sequence(handle, prompt, most, arrived_ps=handle * PS_PER_SECOND, adapter=adapter)
        before = [(one.name, dict(one.figures)) for one in fleet]
        given = fields_of(sequence)
        choice = placement.place(sequence, tuple(fleet))
        if changed := put_back(sequence, given):
            raise PolicyFault(
                f"request {handle}: `place` changed the request's {', '.join(changed)}; it may only look at it"
            )
        _check(choice, handle, fleet)
        if [(one.name, one.figures) for one in fleet] != before:
            raise PolicyFault(f"request {handle}: `place` changed a candidate; it may only look")
        placed.append(choice.candidate.name)
        chosen = next(one for one in fleet if one is choice.candidate)
        chosen.figures["num_waiting"] += 1
        chosen.figures["waiting_tokens"] += prompt
        for one in fleet:
            one.move_on(rng)
    return placed


def _check(choice: object, handle: int, fleet: list[Worker]) -> None:
    names = ", ".join(one.name for one in fleet)
    if not isinstance(choice, Choice):
        raise PolicyFault(
            f"request {handle}: `place` answered {choice!r}; it must be a Choice(candidate, why) of one of {names}"
        )
    if not any(choice.candidate is one for one in fleet):
        raise PolicyFault(
            f"request {handle}: `place` chose {getattr(choice.candidate, 'name', choice.candidate)!r}, which is no"
            f" candidate; there are {names}. Workers come and go: choose among those that are given"
        )
    if not isinstance(choice.why, str):
        raise PolicyFault(f"request {handle}: the reason of the Choice is {choice.why!r}; it must be words")


def _worker(rng: np.random.Generator, number: int, predicts: bool) -> Worker:
    running, waiting = int(rng.integers(0, 40)), int(rng.integers(0, 10)) * int(rng.random() < 0.5)
    held = rng.random(3) < 0.4
    figures = {
        "num_waiting": waiting,
        "num_running": running,
        "kv_tokens": running * int(rng.integers(1, 2_000)),
        "is_blocked": int(waiting and rng.random() < 0.3),
        "slowdown": int(rng.integers(500, 4_000)),
        "usual_slowdown": int(rng.integers(500, 2_000)),
        "prompt_share": int(rng.integers(0, 900)),
        "waiting_tokens": waiting * int(rng.integers(1, 2_000)),
        "output_ratio": int(rng.integers(1, 1_001)),
    }
    figures |= {name: int(rng.integers(1, 10**power)) for name, power in zip(Pace._fields, (10, 8, 5, 8), strict=True)}
    adapters = frozenset(f"adapter-{index}" for index in range(3) if held[index])
    cached_tokens = int(rng.integers(0, 2_000)) * int(rng.random() < 0.5)
    return Worker(f"worker-{number}", figures, adapters, cached_tokens, is_asked_to_predict=predicts)
