"""Builds a replica from its settings, by the rows of the policy tables; and says which settings exclude each other."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from lorrery.scheduler.core.adapters.loads import WELL, AdapterCosts, LoadFaults, LoadTime
from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.adapters.slots import AdapterSlots
from lorrery.scheduler.core.planner import ReplicaOptions
from lorrery.scheduler.core.policies import (
    BATCHINGS,
    MEMORIES,
    NO_BOUND,
    PREFIX_CACHES,
    QUEUES,
    batching_name,
    batching_of,
    limits_of,
    policy_of,
    way_of,
)
from lorrery.scheduler.core.prefix_cache.base import PrefixCache
from lorrery.scheduler.core.protocols import Batching, Queue
from lorrery.scheduler.core.queues.pets import DeviceProfile
from lorrery.scheduler.core.queues.waiting import MAX_OVERTAKES
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import LIMITS, SET, ReplicaSettings, is_among
from lorrery.worker.device.catalogue.tables import PACKAGE, Catalogue
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.steptime import STEP_TIME_MODELS


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
            front_end=settings.front_end,
        ),
    )


TABLES_PACKAGE = PACKAGE
"""The package whose folder `data` holds the shipped tables."""

ENGINE = "present-day"
"""Workers do not announce their engine; for costs that are only compared with each other, any one will do."""


class Devices:
    """GPUs, models and engines by the names that settings and workers use.

    The shell reads the catalogue's tables: a pure room opens no files.

    Args:
        tables: pairs (source of the table, table), as for `worker.device.catalogue.tables`.

    Raises:
        CatalogueError: a malformed table.
    """

    def __init__(self, tables: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        self._catalogue = Catalogue(tables)

    def adapter_costs(
        self,
        model: str,
        target_modules: Literal["qkvo", "all-linear"],
        host_gb_per_second: float,
        disk_gb_per_second: float,
    ) -> AdapterCosts:
        """Return what the adapters of a base model cost.

        Raises:
            CatalogueError: no such model.
        """
        return AdapterCosts(self._catalogue.model(model), target_modules, host_gb_per_second, disk_gb_per_second)

    def profile(self, gpu: str, model: str, tensor_parallel: int, step_time: str) -> DeviceProfile:
        """Return the profile of a device by the names that workers announce.

        A `table` or a `fitted` log is known to its worker alone; the roofline stands in for such a device.

        Raises:
            CatalogueError: no such GPU or model.
            KeyError: no such step-time model.
        """
        known = self._catalogue.gpu(gpu)
        engine = self._catalogue.engine(ENGINE, known)
        deployment = Deployment(known, self._catalogue.model(model), tensor_parallel, engine=engine)
        build = STEP_TIME_MODELS["roofline" if step_time in ("table", "fitted") else step_time]
        return DeviceProfile(build(deployment), deployment.gpu, deployment.model, tensor_parallel)


def why_excluded(chosen: Mapping[str, object]) -> str | None:
    """Return why these settings exclude each other, or None if they do not.

    Args:
        chosen: every setting that a row names; `batching` may be None if the policy decides it.
    """
    policy, batching = str(chosen["policy"]), chosen["batching"]
    chosen = {**chosen, "batching": batching_of(policy, None if batching is None else str(batching))}
    row = policy_of(policy)
    for other in QUEUES.values():
        for name, why in other.own_settings.items():
            if name not in row.own_settings and is_among(chosen[name], {SET}):
                return why
    way = way_of(str(chosen["batching"]))
    for exclusion in (*row.excludes, *way.excludes, *MEMORIES[str(chosen["memory"])].excludes):
        if exclusion.applies(chosen):
            return exclusion.why
    return None


def why_too_few_tokens(
    policy: str, batching: str | None, family: str | None, max_req_total_len: int, limits: Mapping[str, object]
) -> str | None:
    """Return why a configured prompt limit that this choice uses is too low; None if it is not.

    Args:
        policy: its name; all arguments are values of the settings.
        batching: way to batch.
        family: limits family.
        max_req_total_len: longest prompt plus output, in tokens.
        limits: the prompt limits of all families by setting; None: not set, and derived.
    """
    if not way_of(batching_of(policy, batching)).prompt_bound:
        return None
    name = LIMITS[limits_of(policy, family)].prompt_limit
    most = limits[name]
    if not isinstance(most, int) or most >= max_req_total_len:
        return None
    return (
        f"{name} ({most}) must be at least max_req_total_len ({max_req_total_len}): a resumed or preempted sequence is"
        " prefilled in one step, unless batching = 'chunked'"
    )
