"""The records of the core's contract: plan, run, commit.

    decision = replica.plan(at)       a Plan, or Idle
    ran = device.run(plan, ...)       live: a worker, step by step; simulated: a jump
    events = replica.commit(plan, ran)

A plan holds for `max_steps` steps, or to the first boundary at or after `until_ps`, or until a sequence ends by
itself, whichever comes first. Within it, planning again after some of its steps changes nothing: commit(k) equals
commit(j), plan, commit(k - j).

Records made for every request or step are not frozen, though they are never changed: a frozen one takes three times as
long to make, and a simulation makes millions. Most have an `__init__` of their own, which, unlike a dataclass's, mypyc
compiles.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

from lorrery.scheduler.core.facts import Event
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.batch import PrefillWork


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Chunk(PrefillWork):
    """A piece of a prompt to compute in one step, as the device takes it.

    Attributes:
        sequence: the prompt's sequence.
    """

    sequence: Sequence

    def __init__(self, sequence: Sequence, new_tokens: int, past_tokens: int, samples: bool) -> None:
        self.sequence = sequence
        self.handle = sequence.handle
        self.new_tokens = new_tokens
        self.past_tokens = past_tokens
        self.samples = samples


@mypyc_attr(acyclic=True, free_list_len=1)
@dataclass(slots=True, init=False)
class Plan:
    """What a device runs next.

    Attributes:
        at_ps: the boundary at which it was decided; the first step starts here.
        max_steps: number of steps within which nothing the scheduler knows can change this batch.
        until_ps: hand back at the first boundary at or after this time.
        joins: sequences new to the device, in order, and those that are to join it anew, which `leaves` has too.
        leaves: sequences that left since the last plan without ending on the device. They leave before others join.
        prefills: prompt chunks of the plan's only step; of its first if `chunk_steps` is above 1.
        chunk_steps: above 1 if `prefills` is one chunk that takes the whole prompt budget and does not finish its
            prompt: in this many steps, the first included, nothing the scheduler knows can change anything but that
            each computes the next chunk of equal size. A driver may run them in one go, as the simulator does, or one.
        decode: whether every sequence past its prompt gets a token.
        hold: whether sequences that end stay until all have ended (static batching).
        adapter_loads: adapters the batch needs; those already resident cost nothing.
        wait_ps: how long the first step waits for loading adapters; the step is longer by that.
        adapter_prefetches: adapters to load in the background.
        adapter_evictions: keys of adapters evicted since the last plan.
        events: what this decision did.
    """

    at_ps: int
    max_steps: int
    until_ps: int | None
    joins: Many[Sequence]
    leaves: Many[Sequence]
    prefills: Many[Chunk]
    chunk_steps: int
    decode: bool
    hold: bool
    wait_ps: int
    adapter_loads: tuple[Adapter, ...]
    adapter_prefetches: tuple[Adapter, ...]
    adapter_evictions: tuple[str, ...]
    events: Many[Event]

    def __init__(
        self, at_ps: int, max_steps: int, prefills: Many[Chunk] = (), *, decode: bool = False, hold: bool = False
    ) -> None:
        self.at_ps = at_ps
        self.max_steps = max_steps
        self.until_ps = None
        self.prefills = prefills
        self.chunk_steps = 1
        self.decode = decode
        self.hold = hold
        self.wait_ps = 0
        self.joins = self.leaves = ()
        self.adapter_loads = self.adapter_prefetches = ()
        self.adapter_evictions = ()
        self.events = ()


@dataclass(slots=True)
class Idle:
    """Nothing to run until `until_ps` or, if that is None, until something arrives.

    Attributes:
        until_ps: when to plan again.
        leaves: as in a plan; sequences cancelled last must not stay on a device that has nothing else to run.
        adapter_evictions: as in a plan.
        events: what this decision did.
    """

    until_ps: int | None
    leaves: Many[Sequence] = ()
    adapter_evictions: tuple[str, ...] = ()
    events: Many[Event] = ()


@mypyc_attr(acyclic=True, free_list_len=1)
@dataclass(slots=True, init=False)
class Ran:
    """What a device ran of a plan.

    Attributes:
        num_steps: steps that ended; at most what is left of the plan's `max_steps`, or `chunk_steps`.
        end_ps: end of the last of them.
        finished: sequences that ended with the last of them (handle, reason).
        silent: those of them that got no token in that step (llm-mock's last).
        busy_ps: duration of the steps, without waits before and between them; 0: unknown.
    """

    num_steps: int
    end_ps: int
    finished: Many[tuple[int, FinishReason]]
    silent: frozenset[int]
    busy_ps: int

    def __init__(
        self,
        num_steps: int,
        end_ps: int,
        finished: Many[tuple[int, FinishReason]] = (),
        silent: frozenset[int] = frozenset(),
        busy_ps: int = 0,
    ) -> None:
        self.num_steps = num_steps
        self.end_ps = end_ps
        self.finished = finished
        self.silent = silent
        self.busy_ps = busy_ps
