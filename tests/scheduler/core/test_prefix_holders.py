"""The tree of what many caches hold says of each what the cache itself says, whatever comes and goes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorrery.scheduler.core.prefix_cache.base import usable_tokens
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.prefix_cache.extents import below
from lorrery.scheduler.core.prefix_cache.holders import PrefixHolders, Run
from lorrery.scheduler.core.sequence import Sequence
from tests.scheduler.core.test_block_cache import BLOCK, CacheMachine

NUM_WORKERS = 3


class Workers:
    """Some caches that change at random, and one tree of what they hold."""

    def __init__(self, seed: int, *, share: bool, by_id: bool) -> None:
        self.rng = np.random.default_rng(seed)
        kind = type("Kind", (CacheMachine,), {"share": share, "by_id": by_id})
        self.machines = [kind() for _ in range(NUM_WORKERS)]
        self.seen: list[Sequence] = []
        self.tell()

    @property
    def caches(self) -> list[BlockCache]:
        return [machine.cache for machine in self.machines]

    def tell(self) -> None:
        self.holders = PrefixHolders(BLOCK, 1)
        for number, cache in enumerate(self.caches):
            cache.tell(None, -1)
            cache.tell(self.holders, number)

    def step(self) -> None:
        rng = self.rng
        machine = self.machines[int(rng.integers(NUM_WORKERS))]
        what = ("arrive", "arrive", "plan", "commit", "commit", "leave", "shrink", "tell")[int(rng.integers(8))]
        if what == "arrive":
            runs = rng.choice([0, 0, 0, 1, 2], int(rng.integers(1, 7))).tolist()
            adapter = (None, None, None, "a")[int(rng.integers(4))]
            salt = ("", "", "", "pepper")[int(rng.integers(4))]
            machine.arrive(runs, int(rng.integers(machine.RUN)), int(rng.integers(1, 10)), adapter, salt)
            self.seen.append(machine.waiting[-1][0])
        elif what == "plan" and not machine.chunks:
            machine.plan(int(rng.choice([3, 8, 20, 60])), int(rng.integers(4)))
        elif what == "commit" and machine.chunks:
            machine.commit()
        elif what == "leave" and machine.batch and not machine.chunks:
            machine.leave(int(rng.integers(21)), int(rng.integers(1, 10)), bool(rng.integers(2)))
        elif what == "shrink":
            machine.shrink(int(rng.choice([0, 1, 2, 4, 7, 12])), int(rng.integers(-1, 2)))
        elif what == "tell" and rng.random() < 0.1:
            self.tell()

    def check(self) -> None:
        for sequence in self.seen[-8:]:
            way = self.holders.along(sequence)
            for number, cache in enumerate(self.caches):
                held = max([tokens for tokens, workers in way if workers >> number & 1], default=0)
                assert held == usable_tokens(cache, sequence, 1)
        ends: dict[int, int] = {}
        for cache in self.caches:
            for root in cache._roots.values():
                assert root.children or root.num_uses, "a root that nobody uses"
                for extent in below(root):
                    assert extent.run is not None
                    assert extent.run.end == extent.end
                    ends[id(extent.run)] = ends.get(id(extent.run), 0) + 1
        for root in self.holders._roots.values():
            assert root.children, "a root below which nobody has a block"
            for run in below(root):
                assert isinstance(run, Run)
                assert run.parent is not None
                assert run.parent.children[run.key] is run
                assert run.start == run.parent.end
                assert run.workers
                assert run.num_ends == ends.pop(id(run), 0)
                alone = [one.workers for one in run.children.values() if isinstance(one, Run)]
                assert run.num_ends or alone != [run.workers], "two runs that could be one"
        assert not ends


@pytest.mark.parametrize(("share", "by_id"), [(False, False), (True, False), (False, True)])
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_a_way_says_how_much_each_worker_has(share: bool, by_id: bool, seed: int) -> None:
    workers = Workers(seed, share=share, by_id=by_id)
    for _ in range(60):
        workers.step()
        workers.check()


def test_of_workers_that_let_go_of_everything_nothing_is_left() -> None:
    workers = Workers(7, share=False, by_id=False)
    for _ in range(200):
        workers.step()
    for machine in workers.machines:
        while machine.batch:
            if machine.chunks:
                machine.commit()
            machine.leave(0, 1, again=False)
        machine.shrink(0, 0)
    assert not workers.holders._roots
    assert not any(cache._roots for cache in workers.caches)
