"""Loads, evictions and residency of an adapter, as schedulers count them and reports show them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from lorrery.vocabulary.units import PS_PER_SECOND

FIGURES = (
    "num_loads",
    "num_failed_loads",
    "num_thrashes",
    "num_evictions",
    "host_load_seconds",
    "disk_load_seconds",
    "resident_seconds",
)
"""Names of the figures in files; times are device seconds."""


@dataclass(slots=True)
class AdapterFigures:
    """Figures of one adapter on all workers, or of several adapters together.

    Attributes:
        num_loads: loads onto a GPU that have ended, failed ones included.
        num_failed_loads: those that failed.
        num_thrashes: loads that began within a minute after the same GPU had evicted the adapter.
        num_evictions: from a GPU; those of a lost worker's adapters are none.
        host_load_ps: duration of the loads from host memory, without time queued for other loads.
        disk_load_ps: likewise from disk.
        resident_ps: time on a GPU, usable; the times on several GPUs add up.
    """

    num_loads: int = 0
    num_failed_loads: int = 0
    num_thrashes: int = 0
    num_evictions: int = 0
    host_load_ps: int = 0
    disk_load_ps: int = 0
    resident_ps: int = 0

    def add(self, other: "AdapterFigures", factor: int = 1) -> None:
        """Add the figures of another adapter or scheduler, or subtract them with a factor of -1."""
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + factor * getattr(other, name))

    def shown(self) -> dict[str, float]:
        """Return the figures by their names in files."""
        return {
            name: getattr(self, name)
            if name.startswith("num_")
            else getattr(self, name.replace("_seconds", "_ps")) / PS_PER_SECOND
            for name in FIGURES
        }


_NAMES = tuple(field.name for field in fields(AdapterFigures))

FiguresByAdapter = Mapping[str, AdapterFigures]


def summed(parts: Iterable[FiguresByAdapter], before: Iterable[FiguresByAdapter] = ()) -> dict[str, AdapterFigures]:
    """Add up schedulers' figures by adapter, less those of an earlier time; adapters without any are left out."""
    found: dict[str, AdapterFigures] = {}
    for some, factor in ((parts, 1), (before, -1)):
        for part in some:
            for adapter_id, figures in part.items():
                found.setdefault(adapter_id, AdapterFigures()).add(figures, factor)
    nothing = AdapterFigures()
    return {adapter_id: figures for adapter_id, figures in sorted(found.items()) if figures != nothing}
