"""Listen addresses of services on one machine, as setting overrides: free ports, consecutive ports, or previous ones.

Addresses for KV events are in `kv_event_ports`.
"""

import json
from collections.abc import Mapping

from lorrery.service.local import kv_event_ports
from lorrery.service.local.service_process import ServiceProcess
from lorrery.service.settings.cluster import Settings

_KEYS = {
    "scheduler": ("listen", "metrics"),
    "worker": ("listen", "metrics"),
    "router": ("listen", "metrics", "http", "vllm_grpc", "smg_vllm_grpc", "sglang_grpc"),
}


def free_ports(settings: Settings) -> list[str]:
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
        return again + kv_event_ports.taken_again(settings, old.others)
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
