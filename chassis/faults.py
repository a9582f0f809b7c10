"""Faults on a schedule: what a cluster lets go wrong, and when. One syntax for the settings, `up` and `simulate`.

    worker_loss,at=30,worker=worker-1,for=10          the worker dies with all it has, and comes back empty
    slow_worker,at=30,worker=worker-0,factor=1.5,for=60    its steps take so many times as long
    adapter_load_failure,at=0,adapter=lora-r8-0,for=20     loads of the adapter that begin in this time fail

Times are device seconds. Without `for` a fault stays to the end; without `adapter` every adapter's loads fail.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from itertools import combinations

from lorrery.chassis.errors import SettingsError
from lorrery.vocabulary.units import NEVER, PS_PER_SECOND

WORKER_LOSS, SLOW_WORKER, LOAD_FAILURE = "worker_loss", "slow_worker", "adapter_load_failure"
_KEYS = {
    WORKER_LOSS: {"at", "worker", "for"},
    SLOW_WORKER: {"at", "worker", "factor", "for"},
    LOAD_FAILURE: {"at", "adapter", "for"},
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        text: as it was asked for.
        kind: a key of the module's list.
        at_ps: when it begins.
        until_ps: when it is over; `NEVER` if it stays.
        worker: whose; empty for adapters.
        adapter: whose loads fail; empty: all.
        factor: of a slow worker's step times.
    """

    text: str
    kind: str
    at_ps: int
    until_ps: int = NEVER
    worker: str = ""
    adapter: str = ""
    factor: Fraction = Fraction(1)


def parse_fault(text: str) -> Fault:
    """Read a fault as the module's text shows it.

    Raises:
        SettingsError: not of that form; the message says what is wrong.
    """
    kind, *parts = (part.strip() for part in text.split(","))
    if kind not in _KEYS:
        raise SettingsError(f"fault {text}: {kind!r} is none of {', '.join(_KEYS)}")
    values: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in _KEYS[kind] or key in values:
            raise SettingsError(f"fault {text}: {part!r}; {kind} has {', '.join(sorted(_KEYS[kind]))}")
        values[key] = value
    for key in {"at", "worker", "factor"} & _KEYS[kind] - values.keys():
        raise SettingsError(f"fault {text}: {key} is missing")
    at = _number(text, "at", values["at"], least=0)
    if at >= NEVER // PS_PER_SECOND:
        raise SettingsError(
            f"fault {text}: at is {values['at']}; a simulation has {NEVER // PS_PER_SECOND:,} s at most"
        )
    until_ps = NEVER
    if "for" in values:
        until_ps = min(round((at + _number(text, "for", values["for"], above=0)) * PS_PER_SECOND), NEVER)
    factor = _number(text, "factor", values["factor"], above=0) if "factor" in values else Fraction(1)
    return Fault(
        text,
        kind,
        round(at * PS_PER_SECOND),
        until_ps,
        values.get("worker", ""),
        values.get("adapter", ""),
        factor,
    )


def _number(text: str, key: str, value: str, *, least: int | None = None, above: int | None = None) -> Fraction:
    try:
        number = Fraction(Decimal(value))
    except (InvalidOperation, ValueError, OverflowError):
        raise SettingsError(f"fault {text}: {key} is {value!r}; it must be a number") from None
    if (least is not None and number < least) or (above is not None and number <= above):
        raise SettingsError(f"fault {text}: {key} is {value}; it must be {'0 or more' if above is None else 'above 0'}")
    return number


def check_faults(faults: Sequence[Fault], *, workers: Iterable[str] | None = None, adapters: Iterable[str]) -> None:
    """Check that faults go together, and with the cluster.

    Args:
        faults: in any order.
        workers: names of the cluster's; None: not known.
        adapters: ids of those that the settings list.

    Raises:
        SettingsError: a fault names what is not there, or overlaps another of its kind and worker.
    """
    known, names = set(adapters), None if workers is None else list(workers)
    for fault in faults:
        if fault.adapter and fault.adapter not in known:
            raise SettingsError(f"fault {fault.text}: no such adapter in adapters.registry")
        if names is not None and fault.worker and fault.worker not in names:
            raise SettingsError(f"fault {fault.text}: no such worker; there are {', '.join(names)}")
    for fault, earlier in combinations(sorted(faults, key=lambda fault: -fault.at_ps), 2):
        same = fault.kind != LOAD_FAILURE and (fault.kind, fault.worker) == (earlier.kind, earlier.worker)
        if same and fault.at_ps < earlier.until_ps:
            raise SettingsError(f"fault {fault.text}: begins before {earlier.text} is over")


def load_fails(faults: Iterable[Fault], adapter_id: str, at_ps: int) -> bool:
    """Tell whether a load of an adapter fails that begins so long after the faults' times began to count."""
    return any(
        fault.kind == LOAD_FAILURE and fault.at_ps <= at_ps < fault.until_ps and fault.adapter in ("", adapter_id)
        for fault in faults
    )
