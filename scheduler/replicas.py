"""Builds the core's parts from the settings: replicas for workers that attach, adapters, caches, the placement."""

import math
from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from lorrery.scheduler.core.acceptance import ClusterRules
from lorrery.scheduler.core.adapters.loads import WELL, LoadFault, LoadFaults
from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.build import TABLES_PACKAGE, Devices, build_replica
from lorrery.scheduler.core.checked.batching import CheckedBatching
from lorrery.scheduler.core.checked.placement import CheckedPlacement
from lorrery.scheduler.core.checked.queue import CheckedQueue
from lorrery.scheduler.core.front_end import FrontEndCost
from lorrery.scheduler.core.placements.by_adapter import PlacementOptions, Weights
from lorrery.scheduler.core.placements.table import PLACEMENTS, Placement
from lorrery.scheduler.core.policies import batch_limits, policy_of
from lorrery.scheduler.core.prefix_cache.base import PrefixCache
from lorrery.scheduler.core.prefix_cache.static_trie import StaticTrie
from lorrery.scheduler.core.protocols import Batching, Queue
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter
from lorrery.scheduler.messages import WorkerHello
from lorrery.scheduler.plugins import PlugIn, find
from lorrery.scheduler.trie_file import read_corpus, read_trie
from lorrery.service.errors import SettingsError
from lorrery.service.faults.kinds import LOAD_FAILURE
from lorrery.service.faults.rules import LoadRules
from lorrery.service.files.reading import read_tables
from lorrery.service.settings.cluster import Settings
from lorrery.service.settings.sections import Section
from lorrery.vocabulary.units import NEVER, PS_PER_SECOND


def cluster_rules(settings: Settings) -> ClusterRules:
    """Return which requests a scheduler of this cluster accepts, and how long it lets them wait."""
    own = settings.scheduler
    others = {
        "max_total_token_num": own.max_total_token_num if own.refuse_never_fits else NEVER,
        "max_waiting_requests_per_tenant": (
            NEVER if own.max_waiting_requests_per_tenant is None else own.max_waiting_requests_per_tenant
        ),
        "time_scale": settings.time_scale,
    }
    return ClusterRules(**_of_same_name(ClusterRules, own) | others)


def replica_settings(settings: Settings, max_total_token_num: int, **of_worker: Any) -> ReplicaSettings:  # noqa: ANN401
    """Return the settings of a replica.

    Args:
        settings: of the cluster, for the GPU of the replica's worker.
        max_total_token_num: its KV pool in tokens.
        of_worker: fields that only the worker decides; without a worker, they keep their defaults.
    """
    own, adapters = settings.scheduler, settings.adapters
    others = {
        "max_total_token_num": max_total_token_num,
        "prefix_cache": own.prefix_cache.kind,
        "fair_weights": settings.fair_weights(),
        "fair_by": own.fair_by or "adapter",
        "batch_num_adapters": own.batch_num_adapters or 1,
        "first_token_slo_ps": round(own.first_token_slo_seconds * PS_PER_SECOND),
        "max_cpu_loras": adapters.host_places,
        "blocking_loads": adapters.loading == "blocking",
        "sglang": own.sglang.rules,
    }
    return ReplicaSettings(**_of_same_name(ReplicaSettings, own, own.prefix_cache, adapters) | others | of_worker)


def _of_same_name(kind: type[Any], *sections: Section) -> dict[str, Any]:
    """Return the settings whose names are those of fields of a type of the core, which defines what they mean."""
    names = {field.name for field in fields(kind)}
    return {
        name: getattr(section, name) for section in sections for name in type(section).model_fields if name in names
    }


class ReplicaFactory:
    """Builds the parts of one scheduler's core.

    Args:
        settings: of the cluster.

    Raises:
        SettingsError: no such model, policy, way to batch or placement.
        FormatError: the prefix cache's corpus or file cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        adapters = settings.adapters
        self._rng = np.random.default_rng(settings.scheduler.seed)
        self._num_replicas = 0
        try:
            self._devices = Devices(read_tables(TABLES_PACKAGE, settings.catalogue))
            self._costs = self._devices.adapter_costs(
                settings.model,
                adapters.target_modules,
                adapters.host_gb_per_second,
                adapters.disk_gb_per_second,
            )
            self._costs.size_bytes(1)
        except ValueError as error:
            raise SettingsError(f"model: {error}") from None
        own = settings.scheduler
        self._queue = self._plug_in("policy", own.policy, Queue, own.policy_options)
        self._batching = self._plug_in("batching", own.batching or "", Batching, own.batching_options)
        self._placement = self._plug_in("placement", own.placement, Placement, own.placement_options)
        if self._queue is not None:
            self._queue.make()  # a class that is no queue fails now, not at the first attach
        if self._batching is not None:
            self._batching.make(BatchLimits(1, 1))
        _ = self.prefix_cache  # an unreadable corpus fails now, not at the first attach

    @staticmethod
    def _plug_in(part: str, name: str, protocol: type, options: Mapping[str, Any]) -> PlugIn[Any] | None:
        return find(f"scheduler.{part}", name, protocol, options) if ":" in name else None

    def placement(self, rng: np.random.Generator | None = None) -> Placement:
        """Build the placement.

        Args:
            rng: source of randomness; None: the scheduler's own.

        Raises:
            SettingsError: one from outside the tree cannot be made.
        """
        rng = self._rng if rng is None else rng
        if self._placement is not None:
            return CheckedPlacement(self._placement.make(rng, asks=("predicts", "moves_waiting", "asks_all")))
        own = self._settings.scheduler
        weights = Weights(**own.placement_weights.model_dump())
        options = PlacementOptions(own.placement_homes, own.placement_draws, weights, own.placement_max_load)
        return PLACEMENTS[own.placement](rng, options)

    def adapter(self, adapter_id: str, rank: int, version: int = 0, number: int = 0) -> Adapter:
        """Build an adapter, with the slots that it takes in a KV pool."""
        rule = self._settings.adapters.slots_rule
        slots = self._costs.exact_slots(rank) if rule == "exact" else 0 if rule == "reserved" else None
        return Adapter(adapter_id, rank, slots, version, number)

    @cached_property
    def prefix_cache(self) -> PrefixCache | None:
        """The prefix cache that all replicas share: the static one. A block cache belongs to one replica."""
        own = self._settings.scheduler.prefix_cache
        if own.kind != "static_trie":
            return None
        if own.trie is not None:
            return read_trie(own.trie)
        assert own.corpus is not None
        return StaticTrie.build(read_corpus(own.corpus), own.cache_size)

    def replica_settings(self, hello: WorkerHello) -> ReplicaSettings:
        """Return the settings of this worker's replica."""
        settings = self._settings.of_gpu(hello.gpu)
        needs_profile = policy_of(settings.scheduler.policy).needs_profile
        return replica_settings(
            settings,
            settings.scheduler.max_total_token_num or hello.max_total_token_num,
            profile=self._devices.profile(hello.gpu, hello.model, hello.tensor_parallel, hello.step_time_model)
            if needs_profile
            else None,
            memory_tokens=hello.max_total_token_num,
            min_computed_tokens=0 if hello.step_time_model == "llm-mock" else 1,
            front_end=FrontEndCost(*hello.front_end),
        )

    def replica(self, settings: ReplicaSettings, load_rules: LoadRules | None = None) -> Replica:
        """Build a replica.

        Args:
            settings: of the replica.
            load_rules: injected load faults, beside the random ones of the settings.
        """
        queue, batching = self._queue, self._batching
        return build_replica(
            settings,
            self.prefix_cache,
            make_queue=None if queue is None else lambda _settings: CheckedQueue(queue.make()),
            make_batching=None
            if batching is None
            else lambda chosen: CheckedBatching(batching.make(batch_limits(chosen))),
            load_ps=self._costs.load_ps,
            load_faults=self._load_faults(load_rules),
        )

    def _load_faults(self, rules: LoadRules | None) -> LoadFaults:
        """Return the load faults of the next replica; its own random stream, so others' loads do not affect it."""
        ratio = self._settings.adapters.load_failure_ratio
        rng = np.random.default_rng((self._settings.scheduler.seed, self._num_replicas))
        self._num_replicas += 1

        def faults_of(adapter: Adapter, attempt: int, at_ps: int) -> LoadFault:
            fails_at_random = ratio > 0 and float(rng.random()) < ratio
            met = [] if rules is None else rules.choose(adapter.adapter_id, at_ps)
            if not met and not fails_at_random:
                return WELL
            fails = fails_at_random or any(fault.kind == LOAD_FAILURE for fault in met)
            return LoadFault(fails, math.prod((fault.factor for fault in met), start=Fraction(1)))

        return faults_of
