"""Decisions and steps as plain numbers and names: the vocabulary of the scheduler's journal.

Live and simulated, the same functions describe what happened, so two runs are equal if their records are. A plan that
continues the previous one changes nothing (the core's contract makes it a no-op), and how often one is made depends on
message timing in a live cluster. So such a plan has no record.
"""

from collections.abc import Iterable
from typing import Any
from zlib import crc32

from lorrery.scheduler.core.facts import (
    AdaptersKept,
    Admitted,
    Cancelled,
    Dropped,
    Event,
    Failed,
    Finished,
    FirstToken,
    Preempted,
    Raised,
    Recalled,
)
from lorrery.scheduler.core.plan import Idle, Plan

FORMAT_VERSION = 11
"""Of the journal. Since 2 a `placed` line has what the placement read; since 3 adapters have versions, their loads
overlap as the settings say, and waiting requests may be recalled for another worker; since 4 an operator may set
faults, since 5 add to them; since 6 finishes have their phases; since 7 a hello has the settings of its worker's
device; since 8 workers retire adapters that are out of use; since 9 they load adapters on request; since 10 cancels
have their causes, some of which finish a request, and requests may skip the prefix cache or
have a salt; since 11 a hello has the worker's front end."""

Record = dict[str, Any]
"""Names and values as JSON has them; empty ones are left out."""


DescribedEvent = Admitted | AdaptersKept | Cancelled | Dropped | Failed | Finished | FirstToken | Preempted | Recalled


class Decisions:
    """Describes one replica's decisions, in order.

    Args:
        phases: whether finishes have their phases; see `describe_events`.
    """

    def __init__(self, *, phases: bool = True) -> None:
        self._phases = phases
        self._mode: tuple[bool, bool] | str | None = None

    def record(self, decision: Plan | Idle) -> Record | None:
        """Return what a decision changes; None: nothing."""
        said = describe_events(decision.events, phases=self._phases)
        if decision.leaves:
            said["leaves"] = [sequence.handle for sequence in decision.leaves]
        if decision.adapter_evictions:
            said["adapter_evictions"] = list(decision.adapter_evictions)
        mode: tuple[bool, bool] | str | None = "idle"
        if isinstance(decision, Plan):
            _describe_work(decision, said)
            # Chunks and waits belong to one step; the next plan differs.
            mode = None if decision.prefills or decision.wait_ps else (decision.decode, decision.hold)
        if not said and mode is not None and mode == self._mode:
            return None
        self._mode = mode
        if isinstance(decision, Plan):
            return {"decode": decision.decode, **({"hold": True} if decision.hold else {}), **said}
        return {"idle": True, **said}


def _describe_work(plan: Plan, said: Record) -> None:
    if plan.joins:
        said["joins"] = [sequence.handle for sequence in plan.joins]
    if plan.prefills:
        said["prefills"] = [[chunk.sequence.handle, chunk.new_tokens, chunk.past_tokens] for chunk in plan.prefills]
    if plan.wait_ps:
        said["wait_ps"] = plan.wait_ps
    if plan.adapter_loads:
        said["adapter_loads"] = [adapter.key for adapter in plan.adapter_loads]
    if plan.adapter_prefetches:
        said["adapter_prefetches"] = [adapter.key for adapter in plan.adapter_prefetches]


def describe_events(events: Iterable[Event], *, phases: bool = True) -> Record:
    """Return the events by kind, in order, each at the time of its decision or step.

    Args:
        events: of that decision or step.
        phases: whether to add the phases of finishes; journals before format 6 do not have them.
    """
    said: Record = {}
    for event in events:
        if isinstance(event, Raised):  # its text need not be the same in every process
            continue
        kind, what = _describe(event)
        said.setdefault(kind, []).append(what)
        if phases and isinstance(event, Finished):
            said.setdefault("phases", []).append(list(event.sequence.phases(event.at_ps)))
    return said


def _describe(event: DescribedEvent) -> tuple[str, Any]:
    match event:
        case Admitted(sequence):
            return "admitted", [sequence.handle, sequence.cached_tokens]
        case FirstToken(sequence):
            return "first_tokens", sequence.handle
        case Finished(sequence, reason, output_tokens):
            return "finished", [sequence.handle, reason.word, output_tokens]
        case Preempted(sequence):
            return "preempted", [sequence.handle, sequence.produced_tokens]
        case Dropped(sequence, reason):
            return "dropped", [sequence.handle, reason.value]
        case Failed(sequence):
            return "failed", sequence.handle
        case Cancelled(sequence):
            return "cancelled", sequence.handle
        case Recalled(sequence, _):
            return "recalled", sequence.handle
        case AdaptersKept(adapter_keys):
            return "adapters_kept", list(adapter_keys)


def tokens_checksum(handles_u32: bytes, token_ids_u32: bytes) -> int:
    """Return the CRC-32 of one step's tokens: who got one, in batch order, then which; little-endian u32 arrays."""
    return crc32(token_ids_u32, crc32(handles_u32))
