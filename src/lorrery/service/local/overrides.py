"""Sets the processes of a local cluster apart from its settings: names, groups and addresses, as overrides.

A worker process has one worker with its own name, or with several GPUs one worker per GPU: `worker-0.0`, `worker-0.1`.
Services listen on free ports, on consecutive ones, or on those of the process that they replace.

The addresses at which workers publish KV events differ for each worker: their ports count up with the workers, as in
vLLM with data-parallel ranks. An endpoint to connect to is a router's, and the same for all.
"""

import json
from collections.abc import Callable, Mapping

from lorrery.service.errors import SettingsError
from lorrery.service.local.processes import ServiceProcess
from lorrery.service.names import gpu_names
from lorrery.service.settings.cluster import Settings

_KEYS = {
    "scheduler": ("listen", "metrics"),
    "worker": ("listen", "metrics"),
    "router": ("listen", "metrics", "http", "vllm_grpc", "smg_vllm_grpc", "sglang_grpc"),
}


def on_free_ports(settings: Settings) -> list[str]:
    """Return the overrides with which every service listens on a free port, on the host given in the settings."""
    addresses = {
        f"{section}.{key}": getattr(getattr(settings, section), key) for section, keys in _KEYS.items() for key in keys
    }
    overrides = [f"{name}={_free(address)}" for name, address in addresses.items() if address]
    return overrides + _engines(settings, {name: _free(port["listen"]) for name, port in _further(settings).items()})


def counted_up(settings: Settings, index: int) -> list[str]:
    """Return the overrides that give a worker process its own ports, by its index."""
    overrides = []
    for key in _KEYS["worker"]:
        host, _, port = getattr(settings.worker, key).rpartition(":")
        overrides.append(f"worker.{key}={host}:{int(port) + index if int(port) else 0}")
    return overrides


def taken_again(settings: Settings, old: ServiceProcess) -> list[str]:
    """Return the overrides with which a service listens on the addresses of its ended process.

    Addresses that the process did not announce, because it ended too early, stay as in its own overrides.
    """
    addresses = {"listen": old.grpc, "metrics": old.metrics, "http": old.http, **old.others}
    again = [f"{old.service}.{key}={addresses[key]}" for key in _KEYS[old.service] if addresses.get(key)]
    if old.service == "worker":
        return again + _kv_events_again(settings, old.others)
    return again + _engines(settings, old.others) if old.service == "router" else again


def _free(address: str) -> str:
    return f"{address.rpartition(':')[0]}:0"


def _further(settings: Settings) -> dict[str, dict[str, str]]:
    """Return the ports of the list `router.engines`, by their names in a router's announcement."""
    ports = settings.router.engine_ports().items()
    return {name: port.model_dump() for name, port in ports if name.startswith("engines[")}


def _engines(settings: Settings, addresses: Mapping[str, str]) -> list[str]:
    """Return the override that sets the addresses given here in `router.engines`; empty: the list has none of them."""
    ports = _further(settings)
    if not ports.keys() & addresses.keys():
        return []
    tables = []
    for name, port in ports.items():
        port |= {"listen": addresses.get(name, port["listen"])}
        pairs = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in port.items()]
        tables.append(f"{{{', '.join(pairs)}}}")
    return [f"router.engines=[{', '.join(tables)}]"]


_ANNOUNCED = {"endpoint": "kv_events", "replay_endpoint": "kv_events_replay"}


def kv_event_endpoints(settings: Settings, index: int) -> list[str]:
    """Return the overrides that give a process its own addresses; `index`: of its first worker."""
    own = settings.worker.kv_events.of_gpu(index)
    return [f"worker.kv_events.{key}={getattr(own, key)}" for key in _kv_event_endpoints_bound(settings)]


def _kv_events_again(settings: Settings, announced: Mapping[str, str]) -> list[str]:
    """Return the overrides with which a restarted worker reuses the ports that it had chosen as free ones.

    Args:
        settings: of the cluster.
        announced: addresses announced by the worker.
    """
    return [
        f"worker.kv_events.{key}={endpoint[:-1]}{announced[_ANNOUNCED[key]].rpartition(':')[2]}"
        for key, endpoint in _kv_event_endpoints_bound(settings).items()
        if endpoint.endswith(":0") and _ANNOUNCED[key] in announced  # only a process with one worker has it
    ]


def check_kv_event_ports(settings: Settings, num_workers: int) -> None:
    """Check that the ports of `num_workers` workers do not collide.

    Raises:
        SettingsError: they do.
    """
    ports = [
        int(endpoint.rpartition(":")[2])
        for endpoint in _kv_event_endpoints_bound(settings).values()
        if endpoint.startswith("tcp")
    ]
    if len(ports) == 2 and all(ports) and abs(ports[0] - ports[1]) < num_workers:
        raise SettingsError(
            f"worker.kv_events: the ports of endpoint ({ports[0]}) and replay_endpoint ({ports[1]}) count up with the"
            f" workers, and meet; with {num_workers} workers leave at least {num_workers} between them"
        )


def _kv_event_endpoints_bound(settings: Settings) -> dict[str, str]:
    own = settings.worker.kv_events
    endpoints = {"endpoint": own.endpoint if own.binds else None, "replay_endpoint": own.replay_endpoint}
    return {key: endpoint for key, endpoint in endpoints.items() if endpoint is not None}


class WorkerProcesses:
    """The worker processes of a cluster on one machine: their names, their `[[workers]]` groups, their own settings.

    A process has one worker with its own name, or with several GPUs one worker per GPU: `worker-0.0`, `worker-0.1`.

    Args:
        settings: of the cluster.
        count: initial number of processes.

    Attributes:
        workers: name of each process -> names of its workers.

    Raises:
        SettingsError: their ports collide.
    """

    def __init__(self, settings: Settings, count: int) -> None:
        self._settings = settings
        self.workers = settings.workers_of_processes(count)
        self._groups = settings.groups_of_processes(count)
        check_kv_event_ports(settings, sum(map(len, self.workers.values())))

    @property
    def kinds(self) -> list[tuple[Settings, int]]:
        """The settings of each kind of worker, and the number of workers of that kind."""
        return self._settings.kinds(len(self._groups))

    def free_name(self, group: int | None, is_free: Callable[[str], bool]) -> str:
        """Return the first free name of a group; if there is none, a new name, which then belongs to the group.

        Args:
            group: index in `[[workers]]`; None: there are no groups.
            is_free: returns whether a name is free.
        """
        known = zip(self.workers, self._groups, strict=True)
        name = next((one for one, its_group in known if its_group == group and is_free(one)), None)
        if name is None:
            name = f"worker-{len(self.workers)}"
            kind = self._settings if group is None else self._settings.for_group(group)
            self.workers[name] = gpu_names(name, kind.worker.gpus)
            self._groups.append(group)
        return name

    def overrides(self, name: str, scheduler: str) -> list[str]:
        """Return the overrides of a process relative to the cluster's settings; `scheduler`: address that it dials."""
        names = list(self.workers)
        index = names.index(name)
        overrides = [f"worker.name={name}", f"worker.scheduler={scheduler}"]
        if (group := self._groups[index]) is not None:
            overrides.append(f"worker.group={group}")
        before = sum(len(self.workers[name]) for name in names[:index])
        own_ports = counted_up(self._settings, index)
        return overrides + own_ports + kv_event_endpoints(self._settings, before)
