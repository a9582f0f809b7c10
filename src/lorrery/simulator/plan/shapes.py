"""What a cluster could be: every combination of the values to try, with a bound on what it costs.

A shape is the replica: GPU, tensor parallelism, number formats, slots for adapters, limits, and how requests are placed
among several. The bound is arithmetic (`worker.device.capacity`): so many replicas are needed whatever the schedule.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import ceil

from lorrery.scheduler.core.policies import batch_limits, batching_name
from lorrery.scheduler.replicas import replica_settings
from lorrery.service.errors import SettingsError
from lorrery.service.names import cut
from lorrery.service.settings.cluster import Settings, changed
from lorrery.service.settings.reading import known_settings, nearest_setting
from lorrery.simulator.plan.level import Level
from lorrery.simulator.plan.limits import why_too_long
from lorrery.simulator.plan.options import Axis
from lorrery.worker.build import deployment_of, read_catalogue, step_time_of
from lorrery.worker.device.capacity import Capacity, Room, Workload, bytes_of_adapters
from lorrery.worker.device.catalogue.hardware import CatalogueError

__all__ = ["Shape", "axes_of", "capacity_of", "shapes_of"]

_DEGREES = ("1", "2", "4", "8")
_PLACEMENTS = ("adapter_hash", "adapter_shards", "least_loaded")
_SLACK = 0.9
"""Of the bound, for what the arithmetic of a mean step leaves out."""
_PAGED = {"paged", "on_demand", "no_evict", "estimated"}
_CHUNKED = {"chunked", "prefill_first", "vllm", "sglang"}
"""Ways to batch that cut prompts at the budget of a step."""


@dataclass(slots=True, eq=False)
class Shape:
    """One combination.

    Attributes:
        changes: the values, as after `--set`.
        settings: of the cluster with them.
        gpu: of a replica.
        num_gpus: of a replica.
        usd_per_hour: of a replica; None: the price of its GPU is not known.
        e2e: seconds of a request, about.
        least: replicas without which no schedule serves the rate.
    """

    changes: tuple[str, ...]
    settings: Settings = field(repr=False)
    gpu: str
    num_gpus: int
    usd_per_hour: float | None
    e2e: float
    least: int

    @property
    def name(self) -> str:
        """The replica's GPUs, and what else was chosen."""
        others = [one for one in self.changes if not one.startswith(("worker.gpu=", "worker.tensor_parallel="))]
        gpus = f"{self.num_gpus} x {self.gpu}"
        return ", ".join([gpus, *(one.rpartition(".")[2].replace("=", " ").replace('"', "") for one in others)])


def axes_of(settings: Settings, work: Workload, asked: Sequence[Axis], given: Iterable[str]) -> tuple[Axis, ...]:
    """Return what to search over: what was asked for, and what else matters and was not given.

    Args:
        settings: of the cluster.
        work: the requests to serve.
        asked: settings with the values to try.
        given: settings that the caller has chosen.

    Raises:
        SettingsError: a setting is not known.
    """
    known = known_settings(Settings)
    for key, _ in asked:
        path = tuple(key.split("."))
        if path not in known and not any(part.endswith("_options") for part in path):
            near = nearest_setting(path, known)
            raise SettingsError(f"--search {cut(key)}: no such setting{f'; did you mean {near}?' if near else ''}")
    found = dict(asked)
    taken = {*found, *given}

    def add(key: str, values: Iterable[object]) -> None:
        if key not in taken:
            found[key] = tuple(dict.fromkeys(map(str, values)))

    add("worker.tensor_parallel", _DEGREES)
    if work.num_adapters:
        places = settings.adapters.max_loras
        if places is not None:
            more = {2**power for power in range(12) if places < 2**power < work.num_adapters}
            add("adapters.max_loras", sorted({work.num_adapters, min(places, work.num_adapters), *more}, reverse=True))
        add("scheduler.placement", _PLACEMENTS)
    return tuple(found.items())


def shapes_of(
    settings: Settings, work: Workload, level: Level, rate: float, axes: Sequence[Axis]
) -> Iterator[Shape | str]:
    """Yield each shape, or in its place why it is none.

    Args:
        settings: of the cluster.
        work: the requests to serve.
        level: within which.
        rate: requests per second.
        axes: the values to try; later ones vary faster.
    """
    catalogue = read_catalogue(settings.catalogue)
    whole = [(key, values) for key, values in axes if key != "scheduler.placement"]
    placements = dict(axes).get("scheduler.placement", ())
    for values in product(*(values for _, values in whole)):
        changes = tuple(f"{key}={value}" for (key, _), value in zip(whole, values, strict=True))
        try:
            own = changed(settings, changes)
            capacity = capacity_of(own, work)
        except (SettingsError, CatalogueError) as error:
            yield f"{', '.join(changes)}: {error}"
            continue
        if refused := why_too_long(own, work) or _why_not(capacity, work, level):
            yield f"{', '.join(changes)}: {refused}"
            continue
        gpu = capacity.deployment.gpu
        price, num_gpus = catalogue.price(gpu.name), own.worker.tensor_parallel
        most = capacity.most_requests(level.limit("tpot"))
        least = max(ceil(rate / most * _SLACK - 1e-9), len(own.router.schedulers))
        busy = capacity.itl(max(capacity.running_streams // 2, 1))
        e2e = capacity.unqueued_ttft() + work.output_tokens * min(busy, level.limit("tpot") or busy)
        usd = None if price is None else price.usd_per_hour * num_gpus
        for placement in placements or ("",):
            more = (f"scheduler.placement={placement}",) if placement else ()
            yield Shape((*changes, *more), changed(own, more) if more else own, gpu.name, num_gpus, usd, e2e, least)


def _why_not(capacity: Capacity, work: Workload, level: Level) -> str | None:
    """Return why no number of replicas keeps the level; None if arithmetic knows no reason."""
    if capacity.running_streams < 1:
        return f"the KV cache holds {capacity.kv_pool_tokens} tokens, less than one request's"
    ttft, tpot = level.limit("ttft"), level.limit("tpot")
    if ttft is not None and (first := capacity.unqueued_ttft()) > ttft:
        return f"a prompt of {work.prompt_tokens} tokens alone takes {first * 1e3:,.0f} ms to its first token"
    if tpot is not None and (itl := capacity.itl(1)) > tpot:
        return f"a stream alone takes {itl * 1e3:.1f} ms per token"
    return None


def capacity_of(settings: Settings, work: Workload) -> Capacity:
    """Return the arithmetic of one replica.

    Raises:
        SettingsError: unknown names.
        CatalogueError: the model does not fit.
    """
    deployment = deployment_of(settings)
    step_time, pool_tokens = step_time_of(settings, deployment), settings.scheduler.max_total_token_num
    places = None if settings.scheduler.strict else settings.adapters.max_loras
    if places is not None and places >= work.num_adapters:
        places = None
    if pool_tokens is None:
        pool_tokens = deployment.kv_pool_tokens(bytes_of_adapters(deployment, work, places))
    replica = replica_settings(settings, pool_tokens)
    room = Room(
        replica.max_total_token_num,
        replica.block_size if replica.memory in _PAGED else None,
        batch_limits(replica).max_sequences,
        replica.step_tokens if batching_name(replica) in _CHUNKED else None,
        places,
    )
    return Capacity(deployment, step_time, work, room)
