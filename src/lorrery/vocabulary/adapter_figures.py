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

    @classmethod
    def total(cls, parts: Iterable["AdapterFigures"]) -> "AdapterFigures":
        """Add up the figures of several adapters."""
        total = cls()
        for one in parts:
            total.add(one)
        return total

    def __str__(self) -> str:
        failed = f" ({self.num_failed_loads:,} failed)" if self.num_failed_loads else ""
        host, disk, resident = (one / PS_PER_SECOND for one in (self.host_load_ps, self.disk_load_ps, self.resident_ps))
        return (
            f"{self.num_loads:,} loads{failed}, {host:,.2f} s from host and {disk:,.2f} s from disk;"
            f" {self.num_evictions:,} evictions, {self.num_thrashes:,} loads within a minute after one;"
            f" {resident:,.1f} adapter-seconds on GPUs"
        )

    def shown(self) -> dict[str, float]:
        """Return the figures by their names in files."""
        return {
            name: getattr(self, name)
            if name.startswith("num_")
            else getattr(self, name.replace("_seconds", "_ps")) / PS_PER_SECOND
            for name in FIGURES
        }

    @classmethod
    def read(cls, shown: Iterable[float]) -> "AdapterFigures":
        """Return figures given as in files, in order of `FIGURES`."""
        return cls(
            *(
                int(value) if name.startswith("num_") else round(value * PS_PER_SECOND)
                for name, value in zip(FIGURES, shown, strict=True)
            )
        )


_NAMES = tuple(field.name for field in fields(AdapterFigures))

FiguresByAdapter = Mapping[str, AdapterFigures]


def summed(parts: Iterable[FiguresByAdapter], before: Iterable[FiguresByAdapter] = ()) -> dict[str, AdapterFigures]:
    """Add up schedulers' figures by adapter, less those of an earlier time; adapters without any are left out.

    Raises:
        ValueError: there were more before.
    """
    found: dict[str, AdapterFigures] = {}
    for some, factor in ((parts, 1), (before, -1)):
        for part in some:
            for adapter_id, figures in part.items():
                found.setdefault(adapter_id, AdapterFigures()).add(figures, factor)
    if any(figures.num_loads < 0 or figures.resident_ps < 0 for figures in found.values()):
        raise ValueError("figures of adapters have become less")
    nothing = AdapterFigures()
    return {adapter_id: figures for adapter_id, figures in sorted(found.items()) if figures != nothing}
