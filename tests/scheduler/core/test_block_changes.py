"""A copy of the prefix cache that is kept up from its changes equals it, whatever the policies do."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.validation.policy.drive import World, jump, step_by_step
from tests.scheduler.core.cache_copy import CacheCopy, to_be_found
from tests.scheduler.core.test_replica import build, worlds

POLICIES = [
    "req_queue slora_loop blocks",
    "req_queue slora_loop strict blocks",
    "req_queue slora_loop paged blocks loads",
    "fcfs static blocks",
    "fcfs continuous paged blocks",
    "fcfs continuous paged blocks share",
    "fcfs mixed paged blocks share",
    "fcfs chunked paged blocks",
    "fcfs chunked paged blocks share",
]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    world=worlds(),
    pool=st.integers(60, 150),
    most=st.integers(1, 6),
    late=st.integers(0, 20),
)
def test_a_copy_equals_the_cache_after_every_step(policy: str, world: World, pool: int, most: int, late: int) -> None:
    quiet = build(policy, pool, 50, most)
    log = step_by_step(quiet, world.anew())
    replica = build(policy, pool, 50, most)
    cache = replica.prefix_cache
    assert isinstance(cache, BlockCache)
    early, joins_late = CacheCopy(), CacheCopy()
    num_steps = 0
    cache.note_changes()

    def compare(_: Replica) -> None:
        nonlocal num_steps
        num_steps += 1
        changes = cache.take_changes()
        early.apply(changes)
        assert early.paths() == to_be_found(cache)
        if num_steps == late:  # who comes later is given the contents first
            joins_late.apply(cache.contents())
        elif num_steps > late:
            joins_late.apply(changes)
            assert late == 0 or joins_late.blocks == early.blocks

    assert step_by_step(replica, world.anew(), compare) == log
    assert isinstance(quiet.prefix_cache, BlockCache)
    assert cache.paths() == quiet.prefix_cache.paths()


def test_notes_that_begin_late_have_the_hashes_of_those_that_began_early() -> None:
    contents = []
    for notes_from_the_start in (True, False):
        replica = build("fcfs continuous paged blocks", 150, 60, 6)
        cache = replica.prefix_cache
        assert isinstance(cache, BlockCache)
        if notes_from_the_start:
            cache.note_changes()
        adapters = [None, Adapter("a", 1), Adapter("a", 1, version=2), Adapter("b", 1)]
        sequences = [Sequence(n, 9, 2, 0, adapter, "", range(9), range(2)) for n, adapter in enumerate(adapters)]
        jump(replica, World([(0, sequence, 2) for sequence in sequences], []))
        cache.note_changes()
        copy = CacheCopy()
        copy.apply(cache.contents())
        assert copy.paths() == to_be_found(cache)
        assert len(copy.blocks) == 2 * len(adapters)
        contents.append(copy.blocks)
    assert contents[0] == contents[1]


def test_nothing_is_noted_that_nobody_has_asked_for_or_asks_for_any_more() -> None:
    replica = build("fcfs continuous blocks", 150, 60, 6)
    cache = replica.prefix_cache
    assert isinstance(cache, BlockCache)
    jump(replica, World([(0, Sequence(1, 9, 2, 0, None, "", range(9), range(2)), 2)], []))
    assert cache.take_changes() == []
    cache.note_changes()
    cache.note_changes(on=False)
    jump(replica, World([(0, Sequence(2, 9, 2, 0, None, "", range(9, 18), range(2)), 2)], []))
    assert cache.take_changes() == []
