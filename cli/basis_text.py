"""What figures rest on, in lines of text: of a plan, and of a simulation."""

from collections.abc import Iterable

from lorrery.worker.device.basis import Ground

_MISSING = "no measurement of "


def with_sources(grounds: Iterable[Ground]) -> list[str]:
    """Say each basis once with each source, and the figures that have both: `fitted: gemm, host (SOURCE)`."""
    parts: dict[tuple[str, str], list[str]] = {}
    for ground in grounds:
        parts.setdefault((ground.basis, ground.why), []).append(ground.part)
    return [f"{basis}: {', '.join(names)}{f' ({why})' if why else ''}" for (basis, why), names in parts.items()]


def in_one_line(grounds: Iterable[Ground]) -> str:
    """Say each basis once, and the figures that have it; what is assumed for want of a measurement is said so."""
    parts: dict[str, list[str]] = {}
    for ground in grounds:
        named, colon, _ = ground.why.partition(":")
        basis: str = ground.basis
        if basis == "assumed" and named.startswith(_MISSING):
            basis = named if colon else "no measurement"
        parts.setdefault(basis, []).append(ground.part)
    return "; ".join(f"{basis}: {', '.join(names)}" for basis, names in parts.items())
