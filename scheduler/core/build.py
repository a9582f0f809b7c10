"""Builds a replica from its settings, by the rows of the policy tables."""

from collections.abc import Callable

from lorrery.scheduler.core.adapter_loads import WELL, LoadFaults, LoadTime
from lorrery.scheduler.core.adapter_slots import AdapterSlots
from lorrery.scheduler.core.adapters import Residency
from lorrery.scheduler.core.batchings import BATCHINGS, way_of
from lorrery.scheduler.core.memories import MEMORIES, PREFIX_CACHES
from lorrery.scheduler.core.policies import NO_BOUND, QUEUES, batching_name, policy_of
from lorrery.scheduler.core.prefix_cache.base import PrefixCache
from lorrery.scheduler.core.protocols.batching import Batching
from lorrery.scheduler.core.protocols.queue import Queue
from lorrery.scheduler.core.queues.patience import MAX_OVERTAKES
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_options import ReplicaOptions
from lorrery.scheduler.core.replica_settings import ReplicaSettings


def build_replica(
    settings: ReplicaSettings,
    prefix_cache: PrefixCache | None = None,
    *,
    make_queue: Callable[[ReplicaSettings], Queue] | None = None,
    make_batching: Callable[[ReplicaSettings], Batching] | None = None,
    load_ps: LoadTime = lambda adapter, tier: 0,
    load_faults: LoadFaults = lambda adapter, attempt, at_ps: WELL,
) -> Replica:
    """Build a replica.

    Args:
        settings: of the replica.
        prefix_cache: one that replicas share; None: no shared cache. A kind that each replica has for itself
            (`settings.prefix_cache`) takes precedence.
        make_queue: makes a queue that is not in the table, in place of `settings.policy`.
        make_batching: the same for the way to batch.
        load_ps: duration of adapter loads.
        load_faults: faults of adapter loads.

    Raises:
        KeyError: no queue, way to batch, memory rule or prefix cache of that name.
        ValueError: the policy needs a profile, and there is none.
    """
    make_queue = make_queue or QUEUES[settings.policy].build
    make_batching = make_batching or BATCHINGS[batching_name(settings)].build
    make_cache = PREFIX_CACHES[settings.prefix_cache].build
    assert make_queue is not None
    assert make_batching is not None
    looks_ahead = policy_of(settings.policy).looks_ahead and not settings.strict and not settings.blocking_loads
    way = way_of(batching_name(settings))
    max_overtakes = settings.max_overtakes
    if max_overtakes is None and batching_name(settings) not in NO_BOUND:
        max_overtakes = MAX_OVERTAKES
    if way.adapter_slots:
        pinned = settings.sglang.pinned_loras
        adapters: Residency = AdapterSlots(settings.adapter_options, load_ps, load_faults, pinned)
    else:
        adapters = Residency(settings.adapter_options, load_ps, load_faults)
    blocks = None
    if make_cache is not None:
        prefix_cache = blocks = make_cache(settings)
    return Replica(
        make_queue(settings),
        make_batching(settings),
        MEMORIES[settings.memory].build(settings, blocks),
        prefix_cache=prefix_cache,
        adapters=adapters,
        options=ReplicaOptions(
            strict=settings.strict,
            takes_all=not settings.refuse_never_fits,
            min_computed_tokens=settings.min_computed_tokens,
            max_overtakes=0 if settings.strict else max_overtakes,
            look_ahead=settings.look_ahead if looks_ahead else 0,
            overlap=way.may_overlap and settings.sglang.overlap,
            async_scheduling=settings.async_scheduling and settings.memory == "on_demand",
        ),
    )
