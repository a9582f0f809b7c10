"""How many worker processes a scaled cluster begins with, how long a start takes, and what cannot go wrong there."""

from collections.abc import Iterable

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.faults import FREEZE_WORKER, WORKER_LOSS, Fault
from lorrery.settings import Settings
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.memory import weight_bytes

__all__ = ["check_scaled", "num_processes", "start_up_seconds"]


def num_processes(settings: Settings, asked: int | None, num_shards: int) -> int:
    """Return how many processes there are at first.

    Args:
        settings: of the cluster.
        asked: how many are asked for; None: it was not said.
        num_shards: schedulers.

    Raises:
        SettingsError: a number that the autoscaler's bounds leave out.
    """
    own = settings.autoscaler
    if not own.enabled:
        return settings.num_worker_processes(asked)
    if own.min_replicas < num_shards > 1:
        raise SettingsError(
            f"autoscaler.min_replicas is {own.min_replicas}, and there are {num_shards} schedulers, each of which needs"
            f" a worker: set it to {num_shards}"
        )
    least = max(own.min_replicas, 1)
    if asked is None:
        return min(max(settings.num_worker_processes(None), least), own.max_replicas)
    if not least <= asked <= own.max_replicas:
        raise SettingsError(
            f"{asked} workers at first, and the autoscaler keeps {least} to {own.max_replicas}: change --workers, or"
            " autoscaler.min_replicas and max_replicas"
        )
    return asked


def start_up_seconds(settings: Settings, deployment: Deployment) -> float:
    """Return device seconds from a worker process's start to its first plan: each of its workers reads the weights."""
    weights = weight_bytes(deployment.model, deployment.precision, deployment.expert_parallel)
    return settings.autoscaler.start_up_seconds(weights * settings.worker.gpus)


def check_scaled(settings: Settings, faults: Iterable[Fault], *, by_caller: bool = False) -> None:
    """Refuse what does not go with workers that come and go: groups of them, and faults of ones that may not be there.

    Args:
        settings: of the cluster.
        faults: that are to happen.
        by_caller: workers come and go as a caller says; else by the autoscaler, if it is enabled.

    Raises:
        SettingsError: names the first.
    """
    if not (settings.autoscaler.enabled or by_caller):
        return
    scaler = "a caller that scales" if by_caller else "the autoscaler"
    if settings.workers:
        raise SettingsError(f"{scaler} takes workers that are alike; leave out [[workers]] (--set 'workers=[]')")
    for fault in faults:
        if fault.kind in (WORKER_LOSS, FREEZE_WORKER):
            raise SettingsError(
                f"fault {fault.text} with {scaler}, which decides which workers there are; leave out one of them"
            )
