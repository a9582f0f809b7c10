"""Cases for checking a policy: small replicas under pressure, and requests at realistic times.

A case is a function of a seed and its number. The first have few requests, so that a fault first shows in a run that
can be followed by hand. Steps take about ten milliseconds; requests arrive together, milliseconds or seconds apart, so
that deadlines and ageing of any usual length take effect.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lorrery.scheduler.core.build import why_excluded
from lorrery.scheduler.core.policies import BATCHINGS, batching_of, way_of
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.validation.policy.drive import World
from lorrery.vocabulary.units import PS_PER_SECOND

STEP_PS, TOKEN_PS = 10_000_000_000, 20_000_000
GAPS_PS = (0, 0, 1, 5_000_000_000, 30_000_000_000, 400_000_000_000, 3_000_000_000_000)
LONGEST_PROMPT, LONGEST_OUTPUT = 40, 300
RANKS = {"adapter-0": 1, "adapter-1": 2, "adapter-2": 4}


@dataclass(frozen=True, slots=True)
class Case:
    """One replica, and the events that it is exposed to.

    Attributes:
        number: of the case.
        settings: of the replica.
        world: the events.
    """

    number: int
    settings: ReplicaSettings
    world: World

    @property
    def title(self) -> str:
        """Description of the case."""
        own = self.settings
        batching = batching_of(own.policy, own.batching)
        num_requests = len(self.world.arrivals)
        return (
            f"case {self.number}: {num_requests} requests, batching {batching}, memory {own.memory},"
            f" pool of {own.max_total_token_num} tokens, at most {own.max_num_seqs} at once"
        )


@dataclass(frozen=True, slots=True)
class Cases:
    """All cases of a seed.

    Attributes:
        seed: of all of them.
        base: settings of the replica, apart from its size.
        chosen: the scheduler's settings by name, which are not varied.
        make_replica: builds a replica.
    """

    seed: int
    base: ReplicaSettings
    chosen: Mapping[str, Any]
    make_replica: Callable[[ReplicaSettings], Replica]

    def draw(self, number: int) -> Case:
        """Draw a case."""
        rng = np.random.default_rng([self.seed, number])
        long = rng.random() < 0.5
        num_seqs = int(rng.integers(1, 7))
        own = self.base
        batching = own.batching
        if batching is None:
            ways = [way for way in BATCHINGS if why_excluded({**self.chosen, "batching": way}) is None]
            batching = ways[int(rng.integers(len(ways)))] if number % 2 else None
        memory = own.memory
        if memory == "peak" and number % 3 == 2 and self._goes_with_paged(batching):
            memory = "paged"
        pool = int(rng.integers(350, 1_000) if long or memory == "paged" else rng.integers(60, 150))
        longest = min(LONGEST_OUTPUT if long else 20, pool - LONGEST_PROMPT - 8)
        tokens = int(rng.integers(LONGEST_PROMPT + longest, LONGEST_PROMPT + longest + 30))
        settings = replace(
            own,
            batching=batching,
            memory=memory,
            max_total_token_num=pool,
            max_req_total_len=LONGEST_PROMPT + longest,
            running_max_req_size=num_seqs,
            max_num_seqs=num_seqs,
            batch_max_tokens=tokens,
            max_num_batched_tokens=tokens if batching is None or way_of(batching).prompt_bound else num_seqs + 9,
            block_size=4,
            max_loras=int(rng.integers(1, 4)) if rng.random() < 0.3 else None,
        )
        return Case(number, settings, _world(number, rng, longest))

    def _goes_with_paged(self, batching: str | None) -> bool:
        return why_excluded({**self.chosen, "batching": batching, "memory": "paged"}) is None


def _world(number: int, rng: np.random.Generator, longest: int) -> World:
    num_requests = int(rng.integers(1, min(15, 4 + number // 5)))
    names = [None, *RANKS]
    arrivals, at_ps = [], 0
    for handle in range(num_requests):
        at_ps += GAPS_PS[int(rng.integers(len(GAPS_PS)))]
        name = names[int(rng.integers(len(names)))]
        most = int(rng.integers(1, longest + 1))
        sequence = Sequence(
            handle,
            int(rng.integers(1, LONGEST_PROMPT + 1)),
            most,
            arrived_ps=at_ps,
            adapter=None if name is None else Adapter(name, RANKS[name]),
        )
        arrivals.append((at_ps, sequence, most if rng.random() < 0.5 else int(rng.integers(1, most + 1))))
    given_up = rng.permutation(num_requests)[: int(rng.integers(0, 3))].tolist()
    cancels = [(arrivals[handle][0] + int(rng.integers(0, 2 * PS_PER_SECOND)), handle) for handle in given_up]
    cut = frozenset(handle for handle in given_up if handle % 2)
    return World(arrivals, cancels, STEP_PS, TOKEN_PS, cut)
