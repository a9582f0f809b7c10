"""Addresses at which the workers of one machine publish KV events, different for each worker.

Ports count up with the workers, as in vLLM with data-parallel ranks. An endpoint to connect to is a router's, and the
same for all.
"""

from collections.abc import Mapping

from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import Settings

_ANNOUNCED = {"endpoint": "kv_events", "replay_endpoint": "kv_events_replay"}


def own_endpoints(settings: Settings, index: int) -> list[str]:
    """Return the overrides that give a process its own addresses; `index`: of its first worker."""
    own = settings.worker.kv_events.of_gpu(index)
    return [f"worker.kv_events.{key}={getattr(own, key)}" for key in _bound(settings)]


def taken_again(settings: Settings, announced: Mapping[str, str]) -> list[str]:
    """Return the overrides with which a restarted worker reuses the ports that it had chosen as free ones.

    Args:
        settings: of the cluster.
        announced: addresses announced by the worker.
    """
    return [
        f"worker.kv_events.{key}={endpoint[:-1]}{announced[_ANNOUNCED[key]].rpartition(':')[2]}"
        for key, endpoint in _bound(settings).items()
        if endpoint.endswith(":0") and _ANNOUNCED[key] in announced  # only a process with one worker has it
    ]


def check_ports(settings: Settings, num_workers: int) -> None:
    """Check that the ports of `num_workers` workers do not collide.

    Raises:
        SettingsError: they do.
    """
    ports = [int(endpoint.rpartition(":")[2]) for endpoint in _bound(settings).values() if endpoint.startswith("tcp")]
    if len(ports) == 2 and all(ports) and abs(ports[0] - ports[1]) < num_workers:
        raise SettingsError(
            f"worker.kv_events: the ports of endpoint ({ports[0]}) and replay_endpoint ({ports[1]}) count up with the"
            f" workers, and meet; with {num_workers} workers leave at least {num_workers} between them"
        )


def _bound(settings: Settings) -> dict[str, str]:
    own = settings.worker.kv_events
    endpoints = {"endpoint": own.endpoint if own.binds else None, "replay_endpoint": own.replay_endpoint}
    return {key: endpoint for key, endpoint in endpoints.items() if endpoint is not None}
