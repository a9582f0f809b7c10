"""One worker as the scheduler sees it: its share of the queue, its batch, its memory, its adapters, its prefix cache.

`submit` and `cancel` put an event into an inbox and nothing else. `plan` applies the events stamped at or before the
boundary, in (time, sequence number) order, and then decides: admission, eviction, preemption and batch choice happen
there and nowhere else. `commit` notes what the device did. `lose` gives back what is unfinished when the worker is
gone.

No clock here: every time comes in as an argument, in device picoseconds.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NoReturn

from lorrery.scheduler.core.adapters import Residency
from lorrery.scheduler.core.batch import Batch
from lorrery.scheduler.core.batch_context import ReplicaBatchContext
from lorrery.scheduler.core.batching.base import Batching, Step, decodes_on
from lorrery.scheduler.core.headroom import Headroom
from lorrery.scheduler.core.inbox import Inbox, Recall
from lorrery.scheduler.core.memory.base import Check, Memory
from lorrery.scheduler.core.plan import (
    AdaptersKept,
    Cancelled,
    Chunk,
    Dropped,
    DropReason,
    Event,
    Failed,
    Idle,
    Plan,
    Preempted,
    Raised,
    Ran,
    Recalled,
)
from lorrery.scheduler.core.prefix_cache.base import PrefixCache
from lorrery.scheduler.core.queues.base import Queue, hears_of_steps, is_asked_every_step
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.finish_reason import FinishReason

_WAYS_TO_BATCH = "lorrery.scheduler.core.batching."
"""The package of those whose limits stay."""


class SequenceError(Exception):
    """A policy raised while it was given one sequence.

    Args:
        sequence: that one; it is in no queue.
        error: what was raised.
    """

    def __init__(self, sequence: Sequence, error: Exception) -> None:
        super().__init__(sequence.handle)
        self.sequence = sequence
        self.error = error


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """How a replica behaves beside its policy.

    Attributes:
        strict: S-LoRA's way with a cancelled running request: one more step, then out.
        no_lora: serve every request from the base model and move no adapter (S-LoRA's `--no-lora`).
        min_computed_tokens: prompt tokens that are computed even if the whole prompt is cached: 1, or 0 as in llm-mock.
        max_overtakes: so many sequences may enter past one that waits for its adapter, where the queue lets them.
        look_ahead: of so many waiting sequences, the first in queue order, adapters are loaded ahead.
    """

    strict: bool = False
    no_lora: bool = False
    min_computed_tokens: int = 1
    max_overtakes: int = 0
    look_ahead: int = 0


class Replica:
    """A worker's batch and queue.

    What its queue and its way to batch raise comes out of `plan`, whenever they raised it. The replica can go on then,
    without the sequences that it is told to `give_up`.

    Args:
        queue: who waits, and in which order they are tried.
        batching: chooses each next step.
        memory: what fits.
        prefix_cache: what is computed already; None: nothing.
        adapters: which ones the GPU holds.
        options: the rest.
        on_check: told of every memory test, in order; for validation and study.
    """

    def __init__(
        self,
        queue: Queue,
        batching: Batching,
        memory: Memory,
        *,
        prefix_cache: PrefixCache | None = None,
        adapters: Residency | None = None,
        options: ReplicaOptions = ReplicaOptions(),
        on_check: Callable[[Check], None] | None = None,
    ) -> None:
        self.queue = queue
        self.batching = batching
        self.memory = memory
        self.prefix_cache = prefix_cache
        self.options = options
        self._batch = Batch(memory, prefix_cache)
        self.running = self._batch.running
        self.adapters = Residency() if adapters is None else adapters
        self._moves_adapters = not options.no_lora and not self.adapters.options.keep_unused
        self._may_preempt = not memory.reserved
        self._inbox = Inbox()
        self._context = ReplicaBatchContext(
            self.running,
            queue,
            memory,
            prefix_cache=prefix_cache,
            min_computed_tokens=options.min_computed_tokens,
            adapters=None if options.no_lora else self.adapters,
            on_check=on_check,
            max_overtakes=options.max_overtakes,
        )
        self._look_ahead = 0 if options.no_lora else options.look_ahead
        self._looked_at: list[Sequence] = []  # of whom all is begun that can be, as long as the residency stays
        self._looked_at_version = -1
        self._events: list[Event] = []
        self._aborted: dict[int, Sequence] = {}
        self._one_step = is_asked_every_step(queue)
        self._decodes_on = decodes_on(batching)
        self._max_sequences = batching.limits.max_sequences if self._decodes_on else 0
        self._queue_hears = hears_of_steps(queue)
        self._raised: Exception | None = None
        self._queue_is_broken = False
        self._holds = False  # nobody enters the batch that runs

    @property
    def num_queued(self) -> int:
        """Sequences in the queue; none if it cannot say, which the next plan raises."""
        try:
            return len(self.queue)
        except Exception as error:
            self._raised = error
            return 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, in the queue or still in the inbox."""
        try:
            return len(self.queue) + self._inbox.num_arrivals
        except Exception as error:  # as for `num_queued`, without the way there: placements ask each worker
            self._raised = error
            return self._inbox.num_arrivals

    @property
    def num_running(self) -> int:
        """Sequences in the batch, those in prefill included."""
        return len(self.running)

    @property
    def is_blocked(self) -> bool:
        """Whether one that waits, if any does, could not start when it was tried, or is not tried while this runs."""
        return self._context.blocked or (self._holds and self.running.num > 0)

    @property
    def resident_adapters(self) -> Mapping[str, Adapter]:
        """Adapters on the GPU, usable now, by key."""
        return self.adapters.gpu

    @property
    def kv_tokens(self) -> int:
        """Tokens that sequences in the batch hold."""
        return self.running.kv_tokens

    # --- events in --------------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence, at_ps: int) -> None:
        """Hand in a sequence; it is seen at the first boundary at or after `at_ps`."""
        self._inbox.put(at_ps, sequence)

    def cancel(self, handle: int, at_ps: int) -> None:
        """Withdraw a sequence; unknown handles are ignored, since it may just have finished."""
        self._inbox.put(at_ps, handle)

    def recall(self, handle: int, to: str, at_ps: int) -> None:
        """Ask for a waiting sequence for another worker; nothing happens if it has been admitted by then."""
        self._inbox.put(at_ps, Recall(handle, to))

    def headroom(self) -> Headroom:
        """Return what could enter the batch now; of no use after the next plan or commit."""
        running = self.running
        seats = 0 if self._holds and running.num else self.batching.limits.max_sequences - running.num
        adapters = None if self.options.no_lora else self.adapters
        return Headroom(running, seats, self.memory.trial(running), adapters)

    def arrival_matters(self, adapter: Adapter | None = None, *, again: bool = False) -> bool:
        """Tell whether an arrival may change the plan that runs; a cancel always may.

        Args:
            adapter: that it has; its load may begin at once.
            again: whether it was queued before (its worker was lost): it may go before those that wait.
        """
        if again or self.queue.arrivals_read_state or self.batching.arrivals_matter(self._context):
            return True
        return adapter is not None and self.num_waiting < self._look_ahead and not self.adapters.has_asked_for(adapter)

    def never_fits_reason(self, sequence: Sequence) -> str | None:
        """Return None if an empty replica would take this sequence (strict: always), else why not."""
        if self.options.strict:
            return None
        try:
            limits = self.batching.limits
        except Exception:  # a decision comes next, where what a policy raises ends whom it concerns
            return None
        if not limits.partial and sequence.input_tokens > limits.max_prompt_tokens:
            return f"prompt has {sequence.input_tokens} tokens; a batch takes at most {limits.max_prompt_tokens}"
        return self.memory.can_ever_hold(sequence)

    @property
    def kind(self) -> tuple[object, ...]:
        """What `never_fits_reason` depends on: replicas of one kind would take the same sequences.

        One with a way to batch from outside the tree, whose limits may change or raise, is of a kind of its own.
        """
        if not type(self.batching).__module__.startswith(_WAYS_TO_BATCH):
            return (self.options.strict, id(self))
        limits = self.batching.limits
        most = None if limits.partial else limits.max_prompt_tokens
        return (self.options.strict, most, type(self.memory), *self.memory.capacity)

    # --- deciding ---------------------------------------------------------------------------------------------------

    def plan(self, at_ps: int) -> Plan | Idle:
        """Decide what runs from this boundary on.

        Raises:
            SequenceError: the queue cannot take a sequence.
            Exception: whatever else a policy raised, now or since the last plan. Nothing runs before a plan is made.
        """
        adapters, inbox, context = self.adapters, self._inbox, self._context
        if self._raised is not None:
            self._raise_again(self._raised)
        if adapters.loading:
            adapters.advance(at_ps)
        while inbox.next_ps is not None and inbox.next_ps <= at_ps:
            what = inbox.take()
            if isinstance(what, int):
                self._apply_cancel(what, at_ps)
            elif isinstance(what, Recall):
                self._apply_recall(what, at_ps)
            else:
                try:
                    context.enqueue(what, at_ps)
                except Exception as error:
                    self._turn_away(what, error)
        if adapters.given_up:
            self._drop_unloadable(adapters.take_given_up())
        if self._may_preempt:
            self._preempt(at_ps)
        running, batch = self.running, self._batch
        plan: Plan | Idle
        if (
            self._decodes_on
            and running.num
            and not running.prefilling
            and (context.at_rest or context.has_no_candidates())
        ):
            plan = self._decode_on(at_ps)
        else:
            plan = self._choose(at_ps)
        if self.prefix_cache is not None:
            batch.shrink_cache(0)
        if batch.leaves:
            plan.leaves, batch.leaves = batch.leaves, []
        if adapters.evicted:
            plan.adapter_evictions = adapters.take_evicted()
        if self._events:
            plan.events, self._events = self._events, []
        return plan

    def _choose(self, at_ps: int) -> Plan | Idle:
        """Ask the way to batch what runs."""
        context = self._context
        choice = self.batching.choose(context, at_ps)
        if context.events:
            self._events += context.events
            context.events = []
        if self._look_ahead and self.adapters.has_free_load and self.num_queued:
            self._load_ahead(at_ps)
        if isinstance(choice, Step):
            return self._plan_step(choice, at_ps)
        return Idle(_earlier(choice.until_ps, self._next_event_ps(at_ps)))

    def _decode_on(self, at_ps: int) -> Plan:
        """Decide what the way to batch would, as it says (`decodes_on`), while nobody waits and nobody is in prefill.

        A simulation decides so at more than half of its boundaries. Time alone changes nothing for a queue at rest.
        """
        running, adapters = self.running, self.adapters
        self._context.blocked = running.num >= self._max_sequences
        self._holds = False
        max_steps = running.steps_to_length()
        if max_steps > 1:
            if self._aborted or self._one_step:
                max_steps = 1
            elif self._may_preempt:
                max_steps = self.memory.steps_before_full(running, max_steps)
        plan = Plan(at_ps, max_steps, decode=True)
        plan.until_ps = self._inbox.next_ps
        if adapters.loading:
            plan.until_ps = _earlier(plan.until_ps, adapters.next_event_ps)
        return plan

    def _load_ahead(self, at_ps: int) -> None:
        """Begin the loads of those who come next."""
        first, residency = list(islice(self.queue, self._look_ahead)), self.adapters
        if first == self._looked_at and residency.version == self._looked_at_version:
            return
        adapters = [sequence.adapter for sequence in first if sequence.adapter is not None]
        wants_place = bool(adapters) and residency.load_ahead(adapters, at_ps, self._context.pinned_adapters)
        # A place may become free whenever somebody leaves.
        self._looked_at, self._looked_at_version = ([] if wants_place else first), residency.version

    def _turn_away(self, sequence: Sequence, error: Exception) -> NoReturn:
        try:
            self.queue.cancel(sequence.handle)  # it may have been taken in before the error
        except Exception as other:
            self._raised = other
        raise SequenceError(sequence, error) from error

    def _next_event_ps(self, at_ps: int) -> int | None:
        next_ps = self._inbox.next_ps
        if self.adapters.loading:
            next_ps = _earlier(next_ps, self.adapters.next_event_ps)
        if self.adapters.given_up:  # whoever waits for them is dropped in the next decision
            return at_ps
        try:
            wakes_at_ps = self.queue.wakes_at_ps(at_ps)
        except Exception as error:  # the decision is made; the next one, due at once, raises it
            self._raised = error
            return at_ps
        return next_ps if wakes_at_ps is None else _earlier(next_ps, wakes_at_ps)

    def _plan_step(self, step: Step, at_ps: int) -> Plan:
        max_steps = step.max_steps
        if max_steps > 1:
            max_steps = 1 if self._aborted or self._one_step else self.memory.steps_before_full(self.running, max_steps)
        self._holds = step.hold
        plan = Plan(at_ps, max_steps, step.chunks, decode=step.decode, hold=step.hold)
        if step.chunk_steps > 1 and self._may_stretch(step.chunks[0]):
            plan.chunk_steps = step.chunk_steps
            if step.decode:
                plan.chunk_steps = self.memory.steps_before_full(self.running, step.chunk_steps)
        if self._context.admitted:
            plan.joins, self._context.admitted = self._context.admitted, []
            if not self.options.no_lora:
                loads = {s.adapter for s in plan.joins if s.adapter is not None}
                if loads:
                    plan.adapter_loads = tuple(sorted(loads))
                    if self.adapters.options.blocking:
                        self._await_adapters(plan.joins, at_ps)
                    plan.wait_ps = self.adapters.wait_ps(plan.adapter_loads, at_ps)
        if step.prefetch and not self.options.no_lora:
            plan.adapter_prefetches = step.prefetch
            for adapter in step.prefetch:
                self.adapters.prefetch(adapter, at_ps, self._context.pinned_adapters)
        plan.until_ps = self._next_event_ps(at_ps)
        return plan

    def _may_stretch(self, chunk: Chunk) -> bool:
        """Tell whether steps may go on with a long prompt unasked.

        Not with the first piece where a cache shares within a plan: its commit may take blocks back that the sequence
        has shown ahead, and others pin, and then the batch needs more.
        """
        if not self._decodes_on or self._aborted or self._one_step:
            return False
        cache = self.prefix_cache
        return cache is None or not cache.share_within_plan or chunk.past_tokens > chunk.sequence.cached_tokens

    def _await_adapters(self, joins: Iterable[Sequence], at_ps: int) -> None:
        """Let sequences that join wait for their adapters as long as their first step does."""
        adapters = self.adapters
        for sequence in joins:
            if sequence.adapter is not None and sequence.adapter.key not in adapters.gpu:
                sequence.await_adapter(adapters.load_end(sequence.adapter), at_ps)

    def _apply_cancel(self, handle: int, at_ps: int) -> None:
        sequence = self.running.get(handle)
        if sequence is None:
            sequence = self.queue.cancel(handle)
            if sequence is not None:
                self._events.append(Cancelled(sequence))
        elif self.options.strict:
            sequence.aborted = True
            self._aborted[handle] = sequence
        else:
            self._batch.cancel(sequence)
            self._batch.leaves.append(sequence)
            self._events.append(Cancelled(sequence))
            for held, reason in self._batch.all_held().items():
                self._batch.finish(held, reason, at_ps, self._events)
            self._events += self._offload(at_ps)

    def _apply_recall(self, recall: Recall, at_ps: int) -> None:
        if self.running.get(recall.handle) is None:
            sequence = self.queue.cancel(recall.handle)
            if sequence is not None:
                sequence.leave_load(at_ps)
                self._events.append(Recalled(sequence, recall.to))

    def _preempt(self, at_ps: int) -> None:
        while (sequence := self.memory.victim(self.running)) is not None:
            sequence.requeue(self._batch.remove(sequence), at_ps)
            self._batch.leaves.append(sequence)
            self._events.append(Preempted(sequence))
            try:
                self._context.enqueue(sequence, at_ps)
            except Exception as error:
                self._turn_away(sequence, error)

    def output_tokens(self, sequence: Sequence) -> int:
        """Return what a sequence of the batch has produced in it; committed steps count."""
        return self._batch.output_tokens(sequence)

    # --- what the device did ----------------------------------------------------------------------------------------

    def commit(self, plan: Plan, ran: Ran) -> list[Event]:
        """Advance by the steps that ran. Call it once or several times for one plan, in order."""
        batch = self._batch
        events: list[Event] = []
        ended: dict[int, FinishReason] = {}
        if ran.finished:
            if ran.silent:
                batch.were_silent(ran.silent)
            ended = dict(ran.finished)
        running = self.running
        prefilling = running.prefilling
        decoded_ended = {h: reason for h, reason in ended.items() if h not in prefilling} if prefilling else ended
        if plan.chunk_steps > 1:
            batch.advance_chunks(plan, ran.num_steps)
        if plan.decode:
            # What the last of the steps needed, before anything is added. A step with prompts is the plan's only one,
            # and what that needs was seen to when it was planned.
            if self.prefix_cache is not None and not plan.prefills:
                batch.shrink_cache(ran.num_steps - 1)
            self._decode(ran.num_steps, decoded_ended)
        if plan.prefills and plan.chunk_steps == 1:
            batch.advance_prefills(plan, ran, ended, events)
        if plan.hold:
            decoded_ended = batch.hold(decoded_ended)
        for handle, reason in decoded_ended.items():
            batch.finish(handle, reason, ran.end_ps, events)
        # S-LoRA puts adapters out when decoding sequences end, and after a prefill only if nobody is left.
        if decoded_ended:
            events += self._offload(ran.end_ps)
        elif ended and not running.num:
            self._emptied(ran.end_ps)
            events += self._keep_adapters((), ran.end_ps)
        return events

    def _decode(self, num_steps: int, ended: dict[int, FinishReason]) -> None:
        if self._queue_hears:
            try:
                self.queue.decoded(self.running, num_steps)
            except Exception as error:
                self._raised = error
        self.running.advance(num_steps)
        if not self._decodes_on:
            try:
                self.batching.advanced(num_steps)
            except Exception as error:
                self._raised = error
        if not self._aborted:
            return
        for handle, sequence in self._aborted.items():
            if handle not in ended:
                ended[handle] = FinishReason.ABORTED
                self._batch.leaves.append(sequence)
        self._aborted.clear()

    # --- adapters ---------------------------------------------------------------------------------------------------

    def _drop_unloadable(self, given_up: frozenset[str]) -> None:
        for sequence in [s for s in self.queue if s.adapter is not None and s.adapter.key in given_up]:
            if self.queue.cancel(sequence.handle) is not None:
                self._events.append(Dropped(sequence, DropReason.ADAPTER_LOAD))

    def _offload(self, at_ps: int) -> list[Event]:
        """Put out the adapters that nobody uses any more, after sequences have left the batch.

        Twice where the batch is empty then, as S-LoRA does it (`tests/golden/router_loop.jsonl`).
        """
        events: list[Event] = []
        if self._moves_adapters:
            events += self._keep_adapters(tuple(sorted(self.running.adapter_keys)), at_ps)
        if not self.running.num:
            self._emptied(at_ps)
            events += self._keep_adapters((), at_ps)
        return events

    def _emptied(self, at_ps: int) -> None:
        try:
            self.batching.emptied(at_ps)
        except Exception as error:
            self._raised = error

    def _keep_adapters(self, adapter_keys: tuple[str, ...], at_ps: int) -> list[Event]:
        if not self._moves_adapters:
            return []
        self.adapters.keep_only(adapter_keys, at_ps)
        return [AdaptersKept(adapter_keys)]

    # --- policies that raise ----------------------------------------------------------------------------------------

    def _raise_again(self, error: Exception) -> None:
        if not self._queue_is_broken:
            self._raised = None
        raise error

    def clear_waiting(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Empty the queue, which has raised; return who was in it, and who was let in by a decision that then raised.

        Args:
            sequences: all that this replica has. A queue that has raised is not asked what it holds.
        """
        try:
            self.queue.clear()
        except Exception as error:  # what it may still hold must never run, so it is not asked again
            self._raised, self._queue_is_broken = error, True
            self._inbox.clear()
        to_come = self._inbox.arrivals()
        return [sequence for sequence in sequences if not self._runs(sequence) and sequence.handle not in to_come]

    def _runs(self, sequence: Sequence) -> bool:
        return self.running.get(sequence.handle) is not None and sequence not in self._context.admitted

    def give_up(self, sequences: Iterable[Sequence], message: str, error: Exception) -> None:
        """End sequences because of an error, wherever they are but in the queue; the next decision says so."""
        self._events += self._context.events
        self._context.events = []
        self._events.append(Raised(message, error))
        for sequence in sequences:
            handle = sequence.handle
            if self._runs(sequence):
                self._batch.leaves.append(sequence)
            if self.running.get(handle) is not None:
                self._batch.cancel(sequence)
                self._aborted.pop(handle, None)
            self._events.append(Failed(sequence, message))
        self._context.admitted.clear()

    def idle(self) -> Idle:
        """Decide that nothing runs before something comes, without asking any policy."""
        idle = Idle(self._inbox.next_ps, self._batch.leaves, self.adapters.take_evicted(), self._events)
        self._batch.leaves, self._events = [], []
        return idle

    # --- leaving ----------------------------------------------------------------------------------------------------

    def withdraw_waiting(self, at_ps: int) -> tuple[list[Sequence], list[Event]]:
        """Give back what waits, in order of arrival, and keep what runs (a worker that drains)."""
        return self._inbox.give_back(self._clear_queue(at_ps))

    def lose(self, at_ps: int) -> tuple[list[Sequence], list[Event]]:
        """Forget the worker: give back the unfinished sequences in order of arrival, ready to be queued elsewhere.

        Cancels that were still in the inbox take effect (the events tell); the replica is empty afterwards. What had
        ended but was held (static batching) has ended.
        """
        unfinished = self._clear_queue(at_ps)
        from_batch, ended = self._batch.lose(at_ps)
        unfinished.update((sequence.handle, sequence) for sequence in from_batch)
        self.adapters.clear()
        self._context.admitted.clear()
        self._aborted.clear()
        self._emptied(at_ps)
        left, cancelled = self._inbox.give_back(unfinished)
        return left, [*ended, *cancelled]

    def _clear_queue(self, at_ps: int) -> dict[int, Sequence]:
        """Empty the queue; those that strict S-LoRA has not swept yet were told of when they were cancelled."""
        waiting = {sequence.handle: sequence for sequence in self.queue.clear() if not sequence.aborted}
        for sequence in waiting.values():
            sequence.leave_load(at_ps)
        return waiting


def _earlier(one: int | None, other: int | None) -> int | None:
    if one is None:
        return other
    return one if other is None or one <= other else other
