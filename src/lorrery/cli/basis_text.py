"""Formats the basis of figures, of a plan or a simulation, as lines of text."""

from collections.abc import Iterable

from lorrery.worker.device.basis import Ground

_MISSING = "no measurement of "


def with_sources(grounds: Iterable[Ground]) -> list[str]:
    """Return a line for each pair of basis and source, with its figures: `fitted: gemm, host (SOURCE)`."""
    parts: dict[tuple[str, str], list[str]] = {}
    for ground in grounds:
        parts.setdefault((ground.basis, ground.why), []).append(ground.part)
    return [f"{basis}: {', '.join(names)}{f' ({why})' if why else ''}" for (basis, why), names in parts.items()]


def in_one_line(grounds: Iterable[Ground]) -> str:
    """Return each basis once with the figures that have it; figures assumed for lack of a measurement are marked so."""
    parts: dict[str, list[str]] = {}
    for ground in grounds:
        named, colon, _ = ground.why.partition(":")
        basis: str = ground.basis
        if basis == "assumed" and named.startswith(_MISSING):
            basis = named if colon else "no measurement"
        parts.setdefault(basis, []).append(ground.part)
    return "; ".join(f"{basis}: {', '.join(names)}" for basis, names in parts.items())
