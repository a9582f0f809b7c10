"""Weighted scores, summed as by the endpoint pickers of Kubernetes' Gateway API inference extension and of llm-d.

Each score is from 0 to 1, and a worker's total is the sum of weight x score; the greatest is chosen, then the least
load, then the first considered (`homes`: an adapter's homes, and some drawn at random).

    queue    1 for the fewest waiting, 0 for the most, linear between; 1 if all are equal   (queue-scorer)
    load     m / (m + load), m = 1 + the mean load of those considered: 1 if idle, about half at the mean
    adapter  1 on the GPU, else IN_REACH x u / (u + the time that its load takes there), u = USUAL_LOAD_PS
    prefix   share of the prompt that the worker's prefix cache holds      (prefix-cache-scorer)

No score outweighs a load over `max_load` times the mean of those considered, the new request included, or two above the
least, whichever is more: a worker with more is skipped, as in hashing with bounded loads (arXiv:1608.01350).

Differences from the endpoint picker: `lora-affinity-scorer` gives 1 if an adapter is active, 0.8 if there is a place
for it, 0.6 if it waits for its load and else 0, since it does not know how long a load takes; here a worker reports it.
`running-requests-size-scorer` spreads any difference of load over 0 to 1, so that one more request may weigh as much as
a hundred; `load` is relative to the mean. And an endpoint picker scores all workers for each request.
"""

from collections.abc import Sequence as Many
from math import isinf

import numpy as np

from lorrery.scheduler.core.placements.base import Candidate, Choice, Score, bound_of
from lorrery.scheduler.core.placements.by_adapter import DEFAULT_OPTIONS, Homes, PlacementOptions
from lorrery.scheduler.core.sequence import Adapter, Sequence

IN_REACH = 0.8
USUAL_LOAD_PS = 10 * 10**9
"""Ten milliseconds: a large adapter over PCIe, from the host's memory (docs/policies.md, "Adapters")."""


class Weighted:
    """See the module.

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
