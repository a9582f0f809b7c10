"""Routing rules for LoRA requests as pure functions, and any of them as a placement of the simulator.

`lab.studies.referee` runs the same functions before live engines. A rule sees what a router can: the requests that it
has sent to each engine, and series of the engine's `/metrics`, which in virtual time are as old as a scrape every
`SCRAPE_SECONDS` makes them.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from lorrery.scheduler.core.facts import Admitted, Finished, Handler, Preempted
from lorrery.scheduler.core.placements.base import Candidate, Choice
from lorrery.scheduler.core.sequence import Adapter
from lorrery.scheduler.core.sequence import Sequence as CoreSequence
from lorrery.vocabulary.units import PS_PER_SECOND

SCRAPE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Engine:
    """What a router knows of an engine.

    Attributes:
        load: requests that it has sent there and that have not ended.
        sent: all requests that it has sent there.
        running: adapters of running requests, as in `vllm:lora_requests_info`.
        gpu: adapters in GPU memory, as in `vllm:lora_adapter_loaded`.
        host: adapters in host memory only, likewise.
    """

    load: int = 0
    sent: int = 0
    running: Collection[str] = ()
    gpu: Collection[str] = ()
    host: Collection[str] = ()


Rule = Callable[[str, Sequence[Engine]], int]
"""Returns the number of the engine for a request with this adapter."""
SLACK: Final = 4
"""Open requests that an engine with the adapter may have more than the least loaded one."""


def round_robin(adapter: str, engines: Sequence[Engine]) -> int:
    """Return each engine in turn."""
    del adapter
    return min(range(len(engines)), key=lambda number: engines[number].sent)


def least_loaded(adapter: str, engines: Sequence[Engine]) -> int:
    """Return the engine with the fewest open requests."""
    del adapter
    return _least(engines, range(len(engines)))


def affinity(adapter: str, engines: Sequence[Engine]) -> int:
    """Return the adapter's engine by rendezvous hashing, whatever its load."""
    return max(range(len(engines)), key=lambda number: hashlib.sha256(f"{adapter} {number}".encode()).digest())


def running(adapter: str, engines: Sequence[Engine]) -> int:
    """Return an engine that runs requests of the adapter, else the least loaded."""
    return _first(engines, [[adapter in one.running for one in engines]])


def residency(adapter: str, engines: Sequence[Engine]) -> int:
    """Return an engine with the adapter in GPU memory, else the least loaded."""
    return _first(engines, [[adapter in one.gpu for one in engines]])


def holder(adapter: str, engines: Sequence[Engine]) -> int:
    """Return an engine with the adapter in GPU memory, else one with it in host memory, else the least loaded."""
    return _first(engines, [[adapter in one.gpu for one in engines], [adapter in one.host for one in engines]])


def _least(engines: Sequence[Engine], among: Iterable[int]) -> int:
    return min(among, key=lambda number: (engines[number].load, engines[number].sent))


def _first(engines: Sequence[Engine], tiers: Sequence[Sequence[bool]]) -> int:
    """Return the least loaded engine of the first tier that has one within `SLACK` of the least load."""
    most = min(one.load for one in engines) + SLACK
    for tier in tiers:
        if holders := [number for number, one in enumerate(engines) if tier[number] and one.load <= most]:
            return _least(engines, holders)
    return _least(engines, range(len(engines)))


RULES: Mapping[str, Rule] = {
    rule.__name__: rule for rule in (round_robin, least_loaded, affinity, running, residency, holder)
}


HOST_SECONDS = 0.02
"""A load that takes less comes from host memory (4.6 ms here); one from disk takes 59 ms."""


class Running:
    """The adapters of each worker's running requests; a subscriber of one simulation at a time."""

    def __init__(self) -> None:
        self.by_worker: dict[str, Counter[str]] = {}

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {Admitted: self._entered, Preempted: self._left, Finished: self._left}

    def _entered(self, fact: Admitted, *_: object) -> None:
        self._count(fact.sequence, 1)

    def _left(self, fact: Preempted | Finished, *_: object) -> None:
        self._count(fact.sequence, -1)

    def _count(self, sequence: CoreSequence, by: int) -> None:
        if sequence.adapter is not None:
            self.by_worker.setdefault(sequence.worker, Counter())[sequence.adapter.key] += by


RUNNING = Running()
"""Fed by the simulation that is running, and read by its placement."""


class Routed:
    """A rule as a placement of the simulator.

    Args:
        rng: not used: rules draw nothing.
        rule: its name.
    """

    def __init__(self, rng: np.random.Generator, rule: str) -> None:
        del rng
        self._rule = RULES[rule]
        self._sent: Counter[str] = Counter()
        self._adapters: dict[str, Adapter] = {}
        self._scraped: dict[str, Engine] = {}
        self._scrape = -1

    def place(self, sequence: CoreSequence, candidates: Sequence[Candidate]) -> Choice:
        """Choose by the rule; the engines' series are those of the last scrape."""
        adapter = sequence.adapter
        assert adapter is not None
        self._adapters.setdefault(adapter.key, adapter)
        scrape = int(sequence.arrived_ps / PS_PER_SECOND / SCRAPE_SECONDS)
        if scrape != self._scrape:
            self._scrape = scrape
            self._scraped = {one.name: self._look(one) for one in candidates}
        engines = []
        for one in candidates:
            seen = self._scraped[one.name]
            engines.append(Engine(one.load, self._sent[one.name], seen.running, seen.gpu, seen.host))
        chosen = candidates[self._rule(adapter.key, engines)]
        self._sent[chosen.name] += 1
        return Choice(chosen, self._rule.__name__)

    def _look(self, one: Candidate) -> Engine:
        gpu = {key for key, adapter in self._adapters.items() if one.has_adapter(adapter)}
        most_ps = HOST_SECONDS * PS_PER_SECOND
        host = {key for key, adapter in self._adapters.items() if key not in gpu and one.load_ps(adapter) < most_ps}
        return Engine(running=+RUNNING.by_worker.get(one.name, Counter()), gpu=gpu, host=host)
