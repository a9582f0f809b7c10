"""Faults on a schedule: what a simulation lets go wrong, and when.

    worker_loss,at=30,worker=worker-1,for=10          the worker dies with all it has, and comes back empty
    slow_worker,at=30,worker=worker-0,factor=1.5,for=60    its steps take so many times as long
    adapter_load_failure,at=0,adapter=lora-r8-0,for=20     loads of the adapter that begin in this time fail

Times are device seconds. Without `for` a fault stays to the end; without `adapter` every adapter's loads fail.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import partial
from itertools import combinations

from lorrery.chassis.errors import SettingsError
from lorrery.scheduler.core.sequence import Adapter
from lorrery.simulator.engine import Simulation
from lorrery.simulator.slow import Slowed
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
        raise SettingsError(f"--fault {text}: {kind!r} is none of {', '.join(_KEYS)}")
    values: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in _KEYS[kind] or key in values:
            raise SettingsError(f"--fault {text}: {part!r}; {kind} has {', '.join(sorted(_KEYS[kind]))}")
        values[key] = value
    for key in {"at", "worker", "factor"} & _KEYS[kind] - values.keys():
        raise SettingsError(f"--fault {text}: {key} is missing")
    at = _number(text, "at", values["at"], least=0)
    if at >= NEVER // PS_PER_SECOND:
        raise SettingsError(
            f"--fault {text}: at is {values['at']}; a simulation has {NEVER // PS_PER_SECOND:,} s at most"
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
        raise SettingsError(f"--fault {text}: {key} is {value!r}; it must be a number") from None
    if (least is not None and number < least) or (above is not None and number <= above):
        raise SettingsError(
            f"--fault {text}: {key} is {value}; it must be {'0 or more' if above is None else 'above 0'}"
        )
    return number


def load_fails(faults: Iterable[Fault], adapter: Adapter, at_ps: int) -> bool:
    """Tell whether a load that begins so long after the run's begin fails."""
    return any(
        fault.kind == LOAD_FAILURE
        and fault.at_ps <= at_ps < fault.until_ps
        and fault.adapter in ("", adapter.adapter_id)
        for fault in faults
    )


def schedule_faults(faults: Sequence[Fault], simulation: Simulation) -> None:
    """Let a simulation's workers be lost and slowed down on time; times count from now.

    Raises:
        SettingsError: a fault names a worker that is not there, or overlaps another of its kind and worker.
    """
    workers = {worker.name: worker for worker in simulation.workers}
    start_ps = simulation.now_ps
    for fault, earlier in combinations(sorted(faults, key=lambda fault: -fault.at_ps), 2):
        same = fault.kind != LOAD_FAILURE and (fault.kind, fault.worker) == (earlier.kind, earlier.worker)
        if same and fault.at_ps < earlier.until_ps:
            raise SettingsError(f"--fault {fault.text}: begins before {earlier.text} is over")
    for fault in sorted(faults, key=lambda fault: fault.at_ps):  # of two at one time, an end comes before a begin
        if fault.kind == LOAD_FAILURE:
            continue
        worker = workers.get(fault.worker)
        if worker is None:
            raise SettingsError(f"--fault {fault.text}: no such worker; there are {', '.join(workers)}")
        if fault.kind == WORKER_LOSS:
            begin, end = partial(simulation.lose, worker), partial(simulation.attach, worker)
        else:
            slowed = Slowed(worker.step_time, fault.factor)
            begin = partial(simulation.change_pace, worker, slowed)
            end = partial(simulation.change_pace, worker, worker.step_time)
        simulation.at(start_ps + fault.at_ps, begin)
        if fault.until_ps < NEVER:
            simulation.at(start_ps + fault.until_ps, end)
