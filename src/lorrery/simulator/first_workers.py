"""How many worker processes a scaled cluster begins with, how long a start takes, and checks of both."""

from collections.abc import Sequence

from lorrery.service.errors import SettingsError
from lorrery.service.faults.kinds import WORKER_LOSS, Fault
from lorrery.service.names import gpu_names
from lorrery.service.settings.autoscaler import AutoscalerSettings
from lorrery.service.settings.cluster import Settings
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.memory import weight_bytes

__all__ = ["check_scaled", "most_processes", "num_processes", "possible_names", "start_up_seconds"]


def num_processes(settings: Settings, asked: int | None, num_shards: int) -> int:
    """Return the initial number of processes.

    Args:
        settings: of the cluster.
        asked: number requested; None: not given.
        num_shards: schedulers.

    Raises:
        SettingsError: a number outside the autoscaler's bounds.
    """
    if not settings.is_autoscaled:
        return settings.num_worker_processes(asked)
    if settings.workers:
        count = settings.num_worker_processes(asked)
        for number, group in enumerate(settings.workers):
            own = settings.for_group(number).autoscaler
            where = f"workers.{number}"
            if own.enabled:
                _check_schedulers(f"{where}.autoscaler", own, num_shards)
                _check_bounds(f"{where} has count {group.count}", group.count, own, f"{where}.count, or {where}.")
        return count
    own = settings.autoscaler
    _check_schedulers("autoscaler", own, num_shards)
    if asked is None:
        return min(max(settings.num_worker_processes(None), own.min_replicas, 1), own.max_replicas)
    _check_bounds(f"{asked} workers at first", asked, own, "--workers, or ")
    return asked


def most_processes(settings: Settings, at_first: int) -> int:
    """Return how many processes have names known in advance, which a fault may name.

    With several groups that is the initial number: the run decides which group gets a later number.

    Args:
        settings: of the cluster.
        at_first: initial number of processes.
    """
    if not settings.is_autoscaled or len(settings.workers) > 1:
        return at_first
    return max(kind.autoscaler.max_replicas for kind, _ in settings.kinds(at_first))


def possible_names(settings: Settings, at_first: int) -> list[str]:
    """Return the names of the workers that a fault may name, given the initial number of processes."""
    further = range(at_first, most_processes(settings, at_first))
    gpus = settings.kinds(at_first)[0][0].worker.gpus
    names = settings.worker_names(at_first)
    return [*names, *(name for number in further for name in gpu_names(f"worker-{number}", gpus))]


def _check_schedulers(where: str, own: AutoscalerSettings, num_shards: int) -> None:
    if own.min_replicas < num_shards > 1:
        raise SettingsError(
            f"{where}.min_replicas is {own.min_replicas}, and there are {num_shards} schedulers, each of which needs"
            f" a worker: set it to {num_shards}"
        )


def _check_bounds(what: str, count: int, own: AutoscalerSettings, change: str) -> None:
    least = max(own.min_replicas, 1)
    if not least <= count <= own.max_replicas:
        raise SettingsError(
            f"{what}, and the autoscaler keeps {least} to {own.max_replicas}: change {change}autoscaler.min_replicas"
            " and max_replicas"
        )


def start_up_seconds(settings: Settings, deployment: Deployment) -> float:
    """Return device seconds from a worker process's start to its first plan: each of its workers reads the weights."""
    weights = weight_bytes(deployment.model, deployment.precision, deployment.expert_parallel)
    return settings.autoscaler.start_up_seconds(weights * settings.worker.gpus)


def check_scaled(settings: Settings, faults: Sequence[Fault], *, by_caller: bool = False) -> None:
    """Refuse settings and faults that do not combine with scaling.

    Args:
        settings: of the cluster.
        faults: planned ones.
        by_caller: the caller scales workers; otherwise the autoscaler does, if enabled.

    Raises:
        SettingsError: names the first violation.
    """
    if not (settings.is_autoscaled or by_caller):
        return
    scaler = "a caller that scales" if by_caller else "the autoscaler"
    if by_caller and settings.workers:
        raise SettingsError(f"{scaler} takes workers that are alike; leave out [[workers]] (--set 'workers=[]')")
    if by_caller and (interval := settings.autoscaler.scrape_interval_seconds):
        raise SettingsError(
            f"autoscaler.scrape_interval_seconds is {interval:g}, and {scaler} scrapes as it looks; leave it and"
            " metrics_delay_seconds out (--set autoscaler.scrape_interval_seconds=0 --set"
            " autoscaler.metrics_delay_seconds=0)"
        )
    for fault in faults:
        if fault.kind != WORKER_LOSS:
            continue
        if fault.until_ps != NEVER:
            raise SettingsError(
                f"fault {fault.text} with {scaler}, for which a worker that is lost is replaced at once, by one that"
                " takes a start's time: leave out for"
            )
        if process := fault.worker.rpartition(".")[0]:
            raise SettingsError(
                f"fault {fault.text} with {scaler}, which starts processes with all their GPUs: let the process be"
                f" lost, worker={process}"
            )
