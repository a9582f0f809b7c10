"""The records of the core's contract: plan, run, commit.

    decision = replica.plan(at)       a Plan, or Idle
    ran = device.run(plan, ...)       live: a worker, step by step; simulated: a jump
    events = replica.commit(plan, ran)

A plan holds for `max_steps` steps, or to the first boundary at or after `until_ps`, or until a sequence ends by
itself, whichever comes first. Within it, planning again after some of its steps changes nothing: commit(k) equals
commit(j), plan, commit(k - j).

Records that are made for every request or step are not frozen, though nobody changes them: a frozen one takes three
times as long to make, and a simulation makes millions.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from enum import Enum

from scheduler.core.sequence import Adapter, Sequence


class EndReason(Enum):
    """Why a sequence ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(slots=True)
class Chunk:
    """A piece of a prompt to compute in one step.

    Attributes:
        sequence: whose.
        new_tokens: tokens to compute.
        past_tokens: tokens of it that are in the cache already.
        samples: whether the chunk ends the prompt, so that a token comes out.
    """

    sequence: Sequence
    new_tokens: int
    past_tokens: int
    samples: bool


@dataclass(slots=True)
class Admitted:
    """A sequence entered the batch."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A cancelled sequence has left, with all it held; strict S-LoRA keeps its place in the queue until it is swept."""

    sequence: Sequence


class DropReason(Enum):
    """Why a waiting sequence was given up."""

    SERVICE_LEVEL = "service level"
    ADAPTER_LOAD = "adapter load"


@dataclass(frozen=True, slots=True)
class Dropped:
    """A waiting sequence was given up: its service level cannot be met, or its adapter could not be loaded."""

    sequence: Sequence
    reason: DropReason = DropReason.SERVICE_LEVEL


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence lost its place in the batch and waits again; what it had is computed anew."""

    sequence: Sequence


@dataclass(slots=True)
class FirstToken:
    """A sequence got its first token at this boundary."""

    sequence: Sequence
    at_ps: int


@dataclass(slots=True)
class Finished:
    """A sequence ended at this boundary and has left."""

    sequence: Sequence
    reason: EndReason
    output_tokens: int
    at_ps: int


@dataclass(frozen=True, slots=True)
class AdaptersKept:
    """Every resident adapter but these was put out of the device's memory."""

    adapter_ids: tuple[str, ...]


Event = Admitted | Cancelled | Dropped | Preempted | FirstToken | Finished | AdaptersKept


@dataclass(slots=True)
class Plan:
    """What a device runs next.

    Attributes:
        at_ps: the boundary at which it was decided; the first step starts here.
        max_steps: how many steps nothing the scheduler knows can change this batch.
        until_ps: hand back at the first boundary at or after this time.
        joins: sequences new to the device, in order.
        leaves: sequences that left since the last plan without ending on the device.
        prefills: prompt pieces of the (then only) step.
        decode: whether every sequence past its prompt gets a token.
        hold: whether sequences that end stay until all have ended (static batching).
        adapter_loads: adapters the batch needs; those already resident cost nothing.
        wait_ps: how long the first step waits for adapters on their way; it is longer by that.
        adapter_prefetches: adapters to load in the background.
        adapter_evictions: adapters put out since the last plan.
        events: what this decision did.
    """

    at_ps: int
    max_steps: int
    until_ps: int | None = None
    joins: Many[Sequence] = ()
    leaves: Many[Sequence] = ()
    prefills: Many[Chunk] = ()
    decode: bool = False
    hold: bool = False
    wait_ps: int = 0
    adapter_loads: tuple[Adapter, ...] = ()
    adapter_prefetches: tuple[Adapter, ...] = ()
    adapter_evictions: tuple[str, ...] = ()
    events: Many[Event] = ()


@dataclass(slots=True)
class Idle:
    """Nothing to run until `until_ps` or, if that is None, until something arrives.

    Attributes:
        until_ps: plan again then.
        leaves: as in a plan; what was cancelled last must not stay on a device that has nothing else to do.
        adapter_evictions: as in a plan.
        events: what this decision did.
    """

    until_ps: int | None
    leaves: Many[Sequence] = ()
    adapter_evictions: tuple[str, ...] = ()
    events: Many[Event] = ()


@dataclass(slots=True)
class Ran:
    """What a device did of a plan.

    Attributes:
        num_steps: steps that ended; at most what is left of the plan's `max_steps`.
        end_ps: end of the last of them.
        finished: sequences that ended with the last of them (handle, reason).
        silent: those among them to which that step gave no token (llm-mock's last).
    """

    num_steps: int
    end_ps: int
    finished: Many[tuple[int, EndReason]] = ()
    silent: frozenset[int] = frozenset()
