"""Where services of one machine listen, as overrides of their settings: free ports, ones counted up, or those they had.

What workers publish KV events at is in `kv_event_ports`.
"""

from lorrery.local import kv_event_ports
from lorrery.local.service_process import ServiceProcess
from lorrery.settings import Settings

_KEYS = {
    "scheduler": ("listen", "metrics"),
    "worker": ("listen", "metrics"),
    "router": ("listen", "metrics", "http", "vllm_grpc", "smg_vllm_grpc", "sglang_grpc"),
}


def free_ports(settings: Settings) -> list[str]:
    """Return the overrides with which every service listens on a free port of the host that the settings name."""
    addresses = {
        f"{section}.{key}": getattr(getattr(settings, section), key) for section, keys in _KEYS.items() for key in keys
    }
    return [f"{name}={address.rpartition(':')[0]}:0" for name, address in addresses.items() if address]


def counted_up(settings: Settings, index: int) -> list[str]:
    """Return the overrides with which a worker process, by its index, has ports of its own."""
    overrides = []
    for key in _KEYS["worker"]:
        host, _, port = getattr(settings.worker, key).rpartition(":")
        overrides.append(f"worker.{key}={host}:{int(port) + index if int(port) else 0}")
    return overrides


def taken_again(settings: Settings, old: ServiceProcess) -> list[str]:
    """Return the overrides with which a service listens where a process of it did that has ended.

    What that process did not announce, since it ended too early, stays as its own overrides say.
    """
    addresses = {"listen": old.grpc, "metrics": old.metrics, "http": old.http, **old.others}
    again = [f"{old.service}.{key}={addresses[key]}" for key in _KEYS[old.service] if addresses.get(key)]
    return again + kv_event_ports.taken_again(settings, old.others) if old.service == "worker" else again
