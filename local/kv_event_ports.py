"""Where the workers of one machine publish KV events: each on addresses of its own.

Ports count up with the workers, as vLLM's do with data parallel ranks. An endpoint that is connected to is a router's,
and the same for all.
"""

from collections.abc import Mapping

from lorrery.chassis.errors import SettingsError
from lorrery.settings import Settings

_ANNOUNCED = {"endpoint": "kv_events", "replay_endpoint": "kv_events_replay"}


def own_endpoints(settings: Settings, index: int) -> list[str]:
    """Return the overrides with which a process has addresses of its own, whose first worker has this index."""
    own = settings.worker.kv_events.of_gpu(index)
    return [f"worker.kv_events.{key}={getattr(own, key)}" for key in _bound(settings)]


def taken_again(settings: Settings, announced: Mapping[str, str]) -> list[str]:
    """Return the overrides with which a worker takes the ports again that it had where any was free.

    Args:
        settings: of the cluster.
        announced: by the worker.
    """
    return [
        f"worker.kv_events.{key}={endpoint[:-1]}{announced[_ANNOUNCED[key]].rpartition(':')[2]}"
        for key, endpoint in _bound(settings).items()
        if endpoint.endswith(":0") and _ANNOUNCED[key] in announced  # that of a process with one worker
    ]


def check_ports(settings: Settings, num_workers: int) -> None:
    """Check that so many workers do not meet on one port.

    Raises:
        SettingsError: they would.
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
