"""Describes the machine of a run, without which its figures mean nothing."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from lorrery.service.installed import VERSION

_PACKAGES = ("grpcio", "protobuf", "uvloop", "numpy")


def facts() -> dict[str, object]:
    """Return date, machine, versions and the load average of the last minute."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "lorrery": VERSION,
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "kernel": platform.release(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1m": load_average(),
    }


def load_average() -> float:
    """Return how many threads ran or were runnable, mean of the last minute."""
    return round(os.getloadavg()[0], 2)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
