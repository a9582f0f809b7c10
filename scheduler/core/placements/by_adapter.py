"""Placements by adapter: each adapter on few workers, those that come first in its ranking by rendezvous hash.

Each adapter ranks the workers by a hash of its name and theirs (Thaler and Ravishankar, 1998). When a worker attaches
or leaves, its ranking of the others stays as it is: with n workers, a share of k / n of the first k places changes, and
no other. How full a worker may be before the next in the ranking is taken is bounded by the mean load (consistent
hashing with bounded loads; Mirrokni, Thorup and Zadimoghaddam, SODA 2018). `Weighted` scores an adapter's homes among
others.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import nlargest
from math import inf, isinf

import numpy as np

from lorrery.scheduler.core.placements.base import Candidate, Choice, Score, bound_of, least_loaded, load_bound
from lorrery.scheduler.core.placements.by_load import Draw
from lorrery.scheduler.core.sequence import Adapter, Sequence


@dataclass(frozen=True, slots=True)
class Weights:
    """Weight of each score of `weighted`; 0: the score is not used, and its figures are not read."""

    queue: float = 2.0
    load: float = 2.0
    adapter: float = 4.0
    prefix: float = 3.0


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """Options of `adapter_shards` and `weighted`.

    Attributes:
        num_homes: workers that an adapter is sharded over.
        num_drawn: workers drawn at random for each request.
        weights: of the scores.
        max_load: load of a worker, as a multiple of the mean, above which its scores do not count.
    """

    num_homes: int = 2
    num_drawn: int = 2
    weights: Weights = field(default_factory=Weights)
    max_load: float = inf


DEFAULT_OPTIONS = PlacementOptions(max_load=2.0)


MOST_KEPT = 65_536
"""Rankings kept; beyond this, all are recomputed on demand."""
MOST_LISTS = 8
"""Sets of workers whose rankings are kept; beyond this, those of the oldest are dropped."""


def weight(adapter_id: str, worker_id: str) -> bytes:
    """Return the weight by which an adapter ranks a worker; the greatest comes first."""
    return blake2b(f"{worker_id}\0{adapter_id}".encode(), digest_size=8).digest()


class _Ranked:
    """The heads of adapters' rankings of some workers, by adapter."""

    __slots__ = ("heads", "names")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.heads: dict[str, list[int]] = {}


class Rankings:
    """The heads of adapters' rankings.

    They are kept for some sets of workers, so that a request costs no hash, even if requests alternate between those
    that any worker can hold and those that only large ones can.

    Args:
        depth: number of workers kept of each.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._num_kept = 0
        self._by_names: dict[tuple[str, ...], _Ranked] = {}
        self._by_list: dict[int, tuple[Many[Candidate], _Ranked]] = {}  # holds the sequence, so its id is not reused

    def head(self, adapter_id: str, candidates: Many[Candidate]) -> list[int]:
        """Return the indices of an adapter's first workers, in order.

        Cost: two look-ups if `candidates` is one of the last `MOST_LISTS` sequences, which must not be changed; a pass
        over all names if it is another; O(workers) hashes for each adapter when the names are new.
        """
        known = self._by_list.get(id(candidates))
        ranked = self._take_in(candidates) if known is None else known[1]
        head = ranked.heads.get(adapter_id)
        if head is None:
            if self._num_kept >= MOST_KEPT:
                self._num_kept = 0
                for other in self._by_names.values():
                    other.heads.clear()
            weights = [weight(adapter_id, name) for name in ranked.names]
            head = nlargest(self._depth, range(len(weights)), key=weights.__getitem__)
            ranked.heads[adapter_id] = head
            self._num_kept += 1
        return head

    def _take_in(self, candidates: Many[Candidate]) -> _Ranked:
        names = tuple([candidate.name for candidate in candidates])
        ranked = self._by_names.get(names)
        if ranked is None:
            if len(self._by_names) >= MOST_LISTS:
                dropped = self._by_names.pop(next(iter(self._by_names)))
                self._num_kept -= len(dropped.heads)
                self._by_list.clear()
            ranked = self._by_names[names] = _Ranked(names)
        if len(self._by_list) >= MOST_LISTS:
            del self._by_list[next(iter(self._by_list))]
        self._by_list[id(candidates)] = (candidates, ranked)
        return ranked


LOAD_FACTOR = 1.25
"""A worker has room up to this multiple of the mean load."""
MEMORY = 32
MOST_HOMES = 32
"""Depth in a ranking to which room is looked for."""


@dataclass(frozen=True, slots=True)
class LookedAt:
    """The workers to consider for one request.

    Attributes:
        homes: of its adapter, in order of its ranking; empty for the base model.
        drawn: at random.
        most: the load up to which a worker has room.
    """

    homes: list[Candidate]
    drawn: list[Candidate]
    most: int


class Homes:
    """The few workers that a placement looks at: an adapter's homes, and some drawn at random.

    An adapter's homes are the first `num_homes` of its ranking by rendezvous hash. If none of them has room, that is a
    load of at most `LOAD_FACTOR` times the mean (consistent hashing with bounded loads; Mirrokni, Thorup and
    Zadimoghaddam, SODA 2018), the next in the ranking that has room is one too: so a popular adapter has as many homes
    as it needs, always the same ones, up to `MOST_HOMES`; beyond, its requests go to the workers drawn. The mean is
    estimated from the workers drawn, over about the last `MEMORY` requests. So the cost of a placement grows neither
    with workers nor with adapters.

    Args:
        rng: draws workers.
        options: how many homes, and how many workers to draw.
    """

    def __init__(self, rng: np.random.Generator, options: PlacementOptions) -> None:
        self._draw = Draw(rng)
        self._num_homes = options.num_homes
        self._num_drawn = options.num_drawn
        self._rankings = Rankings(max(options.num_homes, MOST_HOMES))
        self._mean_load = 0.0
        self._num_sampled = 0

    def look(self, adapter: Adapter | None, candidates: Many[Candidate]) -> LookedAt:
        """Return the workers to consider for a request with this adapter."""
        drawn = [candidates[index] for index in self._draw.some(self._num_drawn, len(candidates))]
        sampled = sum([candidate.load for candidate in drawn]) / len(drawn)
        self._num_sampled += 1
        self._mean_load += (sampled - self._mean_load) / min(self._num_sampled, MEMORY)
        most = int(LOAD_FACTOR * (self._mean_load + 1))
        if adapter is None:
            return LookedAt([], drawn, most)
        homes: list[Candidate] = []
        has_room = False
        for place, index in enumerate(self._rankings.head(adapter.adapter_id, candidates)):
            if place >= self._num_homes and has_room:
                break
            home = candidates[index]
            here = home.load <= most
            if place < self._num_homes or here:
                homes.append(home)
            has_room = has_room or here
        return LookedAt(homes, drawn, most)


KEPT = 8
"""Workers kept of each ranking; a search for room rarely goes further."""


class AdapterHash:
    """Adapter residency by rendezvous hash with bounded load.

    An adapter's sequences go to the first worker in its ranking that has room: load at most `LOAD_FACTOR` times the
    mean. So an adapter is resident on few workers, each worker serves few adapters, and when a worker attaches or
    leaves only the adapters that ranked it first move. Sequences of the base model go to the least loaded worker.
    """

    moves_waiting = True

    def __init__(self) -> None:
        self._rankings = Rankings(KEPT)

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the first worker in the adapter's ranking that has room."""
        if sequence.adapter is None:
            chosen = least_loaded(candidates)
            return Choice(chosen, f"no adapter; least load, {chosen.load}")
        name = sequence.adapter.adapter_id
        most = load_bound(candidates, LOAD_FACTOR)
        head = [candidates[index] for index in self._rankings.head(name, candidates)]
        for place, candidate in enumerate(head, start=1):
            if candidate.load <= most:
                return _chosen(candidate, place, name, most)
        ranking = sorted(candidates, key=lambda candidate: weight(name, candidate.name), reverse=True)
        for place, candidate in enumerate(ranking, start=1):
            if candidate.load <= most:
                return _chosen(candidate, place, name, most)
        raise AssertionError("the least loaded worker is always within the bound")


def _chosen(candidate: Candidate, place: int, name: str, most: int) -> Choice:
    return Choice(candidate, f"number {place} in the ranking of {name}; load {candidate.load} of {most}")


class AdapterShards:
    """Adapters sharded over k workers each: the less loaded of an adapter's homes, within a bound.

    `Homes` gives the homes, the bound and the workers drawn. With two homes this is the power of two choices among
    them. A request whose homes have no room goes to the least loaded of the workers drawn, as requests for the base
    model do.

    Args:
        rng: draws workers.
        options: how many homes, and how many workers to draw.
    """

    moves_waiting = True

    def __init__(self, rng: np.random.Generator, options: PlacementOptions = DEFAULT_OPTIONS) -> None:
        self._homes = Homes(rng, options)

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the least loaded home that has room."""
        seen = self._homes.look(sequence.adapter, candidates)
        if sequence.adapter is None:
            chosen = least_loaded(seen.drawn)
            return Choice(chosen, f"no adapter; load {chosen.load}, the least of {len(seen.drawn)}")
        name = sequence.adapter.adapter_id
        chosen = least_loaded(seen.homes)
        load = chosen.load
        if load <= seen.most:
            return Choice(chosen, f"load {load} of {seen.most}, the least of {len(seen.homes)} homes of {name}")
        chosen = least_loaded(seen.drawn)
        return Choice(chosen, f"no home of {name} has room for more than {seen.most}; load {chosen.load}")


IN_REACH = 0.8
USUAL_LOAD_PS = 10 * 10**9
"""Ten milliseconds: a large adapter over PCIe, from the host's memory (docs/policies.md, "Adapters")."""


class Weighted:
    """Weighted scores, summed as by the endpoint pickers of Kubernetes' Gateway API inference extension and of llm-d.

    Each score is from 0 to 1, and a worker's total is the sum of weight x score; the greatest is chosen, then the least
    load, then the first considered (`Homes`: an adapter's homes, and some drawn at random).

        queue    1 for the fewest waiting, 0 for the most, linear between; 1 if all are equal   (queue-scorer)
        load     m / (m + load), m = 1 + the mean load of those considered: 1 if idle, about half at the mean
        adapter  1 on the GPU, else IN_REACH x u / (u + the time that its load takes there), u = USUAL_LOAD_PS
        prefix   share of the prompt that the worker's prefix cache holds      (prefix-cache-scorer)

    No score outweighs a load over `max_load` times the mean of those considered, the new request included, or two above
    the least, whichever is more: a worker with more is skipped, as in hashing with bounded loads (arXiv:1608.01350).

    Differences from the endpoint picker: `lora-affinity-scorer` gives 1 if an adapter is active, 0.8 if there is a
    place for it, 0.6 if it waits for its load and else 0, since it does not know how long a load takes; here a worker
    reports it. `running-requests-size-scorer` spreads any difference of load over 0 to 1, so that one more request may
    weigh as much as a hundred; `load` is relative to the mean. And an endpoint picker scores all workers for each
    request.

    Args:
        rng: draws workers.
        options: how many workers are considered, and the weights.
    """

    moves_waiting = True

    def __init__(self, rng: np.random.Generator, options: PlacementOptions = DEFAULT_OPTIONS) -> None:
        self._homes = Homes(rng, options)
        self._weights, self._max_load = options.weights, options.max_load

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the worker with the greatest sum of weighted scores."""
        seen = self._homes.look(sequence.adapter, candidates)
        workers = {worker.name: worker for worker in (*seen.homes, *seen.drawn)}
        scores = self._score(sequence, list(workers.values()))
        best = max(self._within_bound(scores), key=_rank)
        return Choice(workers[best.name], self._why(best, scores), scores)

    def _score(self, sequence: Sequence, workers: list[Candidate]) -> tuple[Score, ...]:
        weights = self._weights
        waiting = [worker.num_waiting for worker in workers]
        loads = [worker.load for worker in workers]
        fewest, span = min(waiting), max(waiting) - min(waiting)
        mean = 1 + sum(loads) / len(loads)
        scores: list[Score] = []
        for worker, num_waiting, load in zip(workers, waiting, loads, strict=True):
            terms = {
                "queue": 1 - (num_waiting - fewest) / span if span else 1.0,
                "load": mean / (mean + load),
            }
            total = weights.queue * terms["queue"] + weights.load * terms["load"]
            if sequence.adapter is not None and weights.adapter:
                terms["adapter"] = _closeness(worker, sequence.adapter)
                total += weights.adapter * terms["adapter"]
            if weights.prefix:
                terms["prefix"] = worker.cached_tokens(sequence) / sequence.input_tokens
                total += weights.prefix * terms["prefix"]
            scores.append(Score(worker.name, total, load, terms))
        return tuple(scores)

    def _within_bound(self, scores: tuple[Score, ...]) -> list[Score]:
        """Return the scores of workers whose load is within the bound; the least loaded always is."""
        loads = [score.load for score in scores]
        if isinf(self._max_load):
            return list(scores)
        most = bound_of(loads, self._max_load)
        return [score for score in scores if score.load <= most]

    def _why(self, best: Score, scores: tuple[Score, ...]) -> str:
        weights = {name: getattr(self._weights, name) for name in best.terms}
        terms = " + ".join([f"{weights[name]:g} x {name} {value:.3f}" for name, value in best.terms.items()])
        others = ", ".join([
            f"{one.name} {one.total:.3f} ({', '.join([f'{name} {value:.3f}' for name, value in one.terms.items()])})"
            for one in scores
            if one is not best
        ])  # fmt: skip
        return f"score {best.total:.3f} = {terms}" + (f"; others: {others}" if others else "")


def _rank(score: Score) -> tuple[float, int]:
    return score.total, -score.load


def _closeness(worker: Candidate, adapter: Adapter) -> float:
    if worker.has_adapter(adapter):
        return 1.0
    return IN_REACH * USUAL_LOAD_PS / (USUAL_LOAD_PS + worker.load_ps(adapter))
