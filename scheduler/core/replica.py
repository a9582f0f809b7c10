"""One worker as the scheduler sees it: its queue, its batch, its memory, its adapters, its prefix cache.

`submit` and `cancel` put an event into an inbox and nothing else. `plan` applies the events stamped at or before the
boundary, in (time, sequence number) order, and then decides (`core.planner`): admission, eviction, preemption and batch
choice happen there and nowhere else. `commit` records what the device did (`core.batch`). `lose` returns the unfinished
sequences of a worker that is gone.

No clock here: every time comes in as an argument, in device picoseconds.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.admission import Headroom
from lorrery.scheduler.core.batch import Batch
from lorrery.scheduler.core.batch_context import ReplicaBatchContext, next_chunk
from lorrery.scheduler.core.checked.base import PolicyErrors
from lorrery.scheduler.core.checked.batching import CheckedBatching
from lorrery.scheduler.core.checked.queue import CheckedBatch, CheckedQueue
from lorrery.scheduler.core.facts import Cancelled, Dropped, Event, Failed, Finished, Raised, Recalled, withdrawn
from lorrery.scheduler.core.inbox import Inbox, LoadOnRequest, Recall, Retire
from lorrery.scheduler.core.memory.base import Check, Memory
from lorrery.scheduler.core.memory.on_demand import OnDemandMemory
from lorrery.scheduler.core.overlap import Overlap
from lorrery.scheduler.core.plan import Idle, Plan, Ran
from lorrery.scheduler.core.planner import PLAIN, Planner, ReplicaOptions
from lorrery.scheduler.core.prefix_cache.base import PrefixCache, SharedBlocks
from lorrery.scheduler.core.protocols import Batching, Queue
from lorrery.scheduler.core.queues.base import hears_of_steps
from lorrery.scheduler.core.refusals import DropReason
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.endings import FinishReason

_NO_ENDS: dict[int, FinishReason] = {}


class Replica:
    """A worker's batch and queue.

    An exception of the queue or the way to batch comes out of `plan`, whenever it was raised. The replica can go on
    afterwards, without the sequences passed to `give_up`.

    Args:
        queue: waiting sequences, and the order in which they are tried.
        batching: chooses each next step.
        memory: decides what fits.
        prefix_cache: KV blocks that are already computed; None: no cache.
        adapters: adapters on the GPU.
        options: everything else.
        on_check: called with every memory test, in order; for validation and study.
    """

    def __init__(
        self,
        queue: Queue,
        batching: Batching,
        memory: Memory,
        *,
        prefix_cache: PrefixCache | None = None,
        adapters: Residency | None = None,
        options: ReplicaOptions = PLAIN,
        on_check: Callable[[Check], None] | None = None,
    ) -> None:
        self.queue = queue
        self.batching = batching
        self.memory = memory
        self.prefix_cache = prefix_cache
        self.options = options
        self._errors = PolicyErrors()
        if isinstance(queue, CheckedQueue):
            self._batch: Batch = CheckedBatch(queue, self._errors, memory, prefix_cache)
        else:
            self._batch = Batch(memory, prefix_cache)
        self.running = self._batch.running
        self.adapters = Residency() if adapters is None else adapters
        self.adapters.serve(self.running.adapter_use)
        self._by_step = isinstance(memory, OnDemandMemory)  # what a step does has effect in the order of its scheduling
        self._may_preempt = not (memory.reserved or self._by_step)
        if isinstance(prefix_cache, SharedBlocks):
            prefix_cache.running = self.running
            prefix_cache.unseen_tokens = int(options.async_scheduling)
        # With async scheduling: the boundary of the last decision, that of the one before it, and whether a step runs.
        self._seen_ps = self._seen_before_ps = -1
        self._steps_run = False
        self._inbox = Inbox(options.front_end)
        self._context = ReplicaBatchContext(
            self._batch,
            queue,
            self._errors,
            min_computed_tokens=options.min_computed_tokens,
            adapters=None if options.no_lora else self.adapters,
            on_check=on_check,
            max_overtakes=options.max_overtakes,
            async_scheduling=options.async_scheduling,
        )
        self._overlap = self._context.overlap = Overlap(self._batch) if options.overlap else None
        self._planner = Planner(
            self._batch, self._context, queue, batching, self.adapters, self._inbox, options, self._errors
        )
        self._look_ahead = 0 if options.no_lora else options.look_ahead
        self._queue_hears = hears_of_steps(queue)

    @property
    def num_queued(self) -> int:
        """Sequences in the queue; 0 if the queue raised, and the next plan re-raises that error."""
        try:
            return len(self.queue)
        except Exception as error:
            self._errors.error = error
            return 0

    @property
    def num_waiting(self) -> int:
        """Waiting sequences, in the queue or still in the inbox."""
        try:
            return len(self.queue) + self._inbox.num_arrivals
        except Exception as error:  # as `num_queued`, inlined for speed: placements read this of each worker
            self._errors.error = error
            return self._inbox.num_arrivals

    @property
    def has_raised(self) -> bool:
        """Whether a policy has raised since the last plan; the next one raises it again."""
        return self._errors.error is not None

    @property
    def next_event_ps(self) -> int | None:
        """When the next event that was handed in takes effect, or a load of an adapter ends."""
        next_ps, end_ps = self._inbox.next_ps, self.adapters.next_event_ps
        if next_ps is None or end_ps is None:
            return end_ps if next_ps is None else next_ps
        return min(next_ps, end_ps)

    @property
    def num_running(self) -> int:
        """Sequences in the batch, those in prefill included."""
        return len(self.running)

    @property
    def passed_over(self) -> list[Sequence]:
        """Waiting sequences that the last admission pass left waiting for their adapters alone, of those it tried."""
        return [sequence for sequence, _ in self._context.passed_over]

    def take_preempted_ended(self) -> list[Sequence]:
        """Return, once, sequences that were preempted though they had ended (async scheduling)."""
        taken, self._context.preempted_ended = self._context.preempted_ended, []
        return taken

    @property
    def ended(self) -> Collection[int]:
        """Handles of sequences that have ended, and keep their places for a step without taking part (async)."""
        return self._batch.ended

    @property
    def is_blocked(self) -> bool:
        """Whether a waiting sequence, if any, did not fit when tried, or is not tried while this batch runs."""
        return self._context.blocked or (self._planner.holds and self.running.num > 0)

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
        """Hand in a sequence; it takes effect at the first boundary at or after `at_ps`."""
        self._inbox.put(at_ps, sequence)

    def cancel(self, handle: int, at_ps: int) -> None:
        """Withdraw a sequence; unknown handles are ignored, since it may just have finished."""
        self._inbox.put(at_ps, handle)

    def recall(self, handle: int, to: str, at_ps: int) -> None:
        """Give up a waiting sequence for worker `to`; nothing happens if it has been admitted by then."""
        self._inbox.put(at_ps, Recall(handle, to))

    def retire(self, adapter_key: str, at_ps: int) -> None:
        """Release an adapter once no sequence here has it; no further request will name it."""
        self._inbox.put(at_ps, Retire(adapter_key))

    def load(self, adapter: Adapter, at_ps: int) -> None:
        """Load an adapter that need not have a sequence here; see `Residency.take_answers`."""
        self._inbox.put(at_ps, LoadOnRequest(adapter))

    def headroom(self) -> Headroom:
        """Return what could enter the batch now; invalid after the next plan or commit."""
        running = self.running
        seats = 0
        if not (self._planner.holds and running.num):
            try:
                seats = self.batching.limits.max_sequences - running.num
            except Exception as error:
                self._errors.error = error
        adapters = None if self.options.no_lora else self.adapters
        return Headroom(running, seats, self.memory.trial(running), adapters)

    def arrival_matters(self, adapter: Adapter | None = None, *, again: bool = False) -> bool:
        """Return whether an arrival may change the running plan; a cancel always may.

        Args:
            adapter: of the arrival; its load may begin at once.
            again: whether it was queued before (its worker was lost): it may go ahead of waiting sequences.
        """
        if again or self.queue.arrivals_read_state or self.batching.arrivals_matter(self._context):
            return True
        if self.options.async_scheduling and self.adapters.next_event_ps is not None:
            return True  # the end of a load may end the plan, at a decision that has to know what came a step before it
        return adapter is not None and self.num_waiting < self._look_ahead and not self.adapters.has_asked_for(adapter)

    def never_fits_reason(self, sequence: Sequence) -> str | None:
        """Return None if an empty replica would take this sequence (strict, `takes_all`: always), else why not."""
        if self.options.strict or self.options.takes_all:
            return None
        try:
            limits = self.batching.limits
            if not limits.partial and sequence.input_tokens > limits.max_prompt_tokens:
                return f"prompt has {sequence.input_tokens} tokens; a batch takes at most {limits.max_prompt_tokens}"
        except Exception:  # the next decision raises it too, and ends the sequences it concerns
            return None
        return self.memory.can_ever_hold(sequence)

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that decides `never_fits_reason`: replicas of one kind would take the same sequences.

        A way to batch from outside the tree, whose limits may change or raise, makes a kind of its own.
        """
        if isinstance(self.batching, CheckedBatching):
            return (self.options.strict, self.options.takes_all, id(self))
        limits = self.batching.limits
        most = None if limits.partial else limits.max_prompt_tokens
        return (self.options.strict, self.options.takes_all, most, type(self.memory), *self.memory.capacity)

    # --- deciding ---------------------------------------------------------------------------------------------------

    def plan(self, at_ps: int) -> Plan | Idle:
        """Decide what runs from this boundary on.

        Raises:
            SequenceError: the queue cannot take a sequence.
            Exception: whatever else a policy raised, now or since the last plan. Nothing runs until a plan succeeds.
        """
        adapters, inbox, context = self.adapters, self._inbox, self._context
        if self._errors.error is not None:
            self._errors.raise_again()
        if adapters.next_event_ps is not None:
            adapters.advance(at_ps)
        effective_ps = self._effective_ps(at_ps) if self.options.async_scheduling else at_ps
        while inbox.next_ps is not None and inbox.next_ps <= effective_ps:
            what = inbox.take()
            if isinstance(what, Sequence):
                context.enqueue(what, at_ps)
            elif isinstance(what, int):
                self._apply_cancel(what, at_ps)
            elif isinstance(what, Recall):
                self._apply_recall(what, at_ps)
            elif isinstance(what, LoadOnRequest):
                adapters.load(what.adapter, at_ps)
            else:
                adapters.retire(what.adapter_key)
        if adapters.staged or adapters.requested:
            adapters.settle(at_ps)
        if adapters.given_up:
            self._drop_unloadable(adapters.take_given_up())
        if adapters.retiring:
            self._put_out_retired(at_ps)
        if self._may_preempt:
            while (victim := self.memory.victim(self.running)) is not None:
                context.preempt(victim, at_ps)
        batch = self._batch
        plan = self._planner.decide(at_ps)
        if self.prefix_cache is not None and not self._by_step:
            batch.shrink_cache(0)
        if self._overlap is not None:
            self._settle(self._overlap, plan, at_ps)
        if self.options.async_scheduling:
            self._steps_run = isinstance(plan, Plan)
            self._context.note_ends()
            if batch.ended and not self._steps_run:
                batch.drop_ended()
                plan.until_ps = at_ps
        if batch.anew and isinstance(plan, Plan):
            batch.leaves += batch.anew
            plan.joins, batch.anew = [*batch.anew, *plan.joins], []
        if batch.leaves:
            plan.leaves, batch.leaves = batch.leaves, []
        if adapters.evicted:
            plan.adapter_evictions = adapters.take_evicted()
        if context.events:
            plan.events, context.events = context.events, []
        return plan

    def _effective_ps(self, at_ps: int) -> int:
        """Return up to which time events have effect on a decision at this boundary, with async scheduling.

        It was taken when the step that ends here began, unless nothing ran. What comes at that very time, as does a
        client's next request when its last one ends, comes after it.
        """
        if at_ps > self._seen_ps:
            self._seen_before_ps, self._seen_ps = self._seen_ps, at_ps
        return self._seen_before_ps - 1 if self._steps_run and self.running.num > len(self._batch.ended) else at_ps

    def _apply_cancel(self, handle: int, at_ps: int, scheduled: int = 0, *, on_device: bool = True) -> None:
        sequence = self.running.get(handle)
        if sequence is None:
            sequence = self.queue.cancel(handle)
            if sequence is not None:
                self._context.events.append(withdrawn(sequence, sequence.produced_tokens))
        elif self._overlap is not None and handle in self._overlap.unseen.ended:
            return  # it has ended, and leaves after the decision
        elif self.options.strict:
            sequence.aborted = True
            self._batch.aborted[handle] = sequence
        else:
            if handle in self._batch.ended:
                self._batch.cancel(sequence)
                return
            output_tokens = sequence.produced_tokens + self._batch.output_tokens(sequence)
            self._batch.cancel(sequence, scheduled - int(self.options.async_scheduling) if self._by_step else 0)
            if on_device:
                self._batch.leaves.append(sequence)
            self._context.events.append(withdrawn(sequence, output_tokens))
            for held, reason in self._batch.all_held().items():
                self._batch.finish(held, reason, at_ps, self._context.events)
            self._context.events += self._planner.decodes_left(at_ps)

    def _apply_recall(self, recall: Recall, at_ps: int) -> None:
        if self.running.get(recall.handle) is None:
            sequence = self.queue.cancel(recall.handle)
            if sequence is not None:
                sequence.leave_load(at_ps)
                self._context.events.append(Recalled(sequence, recall.to))

    def _settle(self, overlap: Overlap, plan: Plan | Idle | None, at_ps: int) -> None:
        """Apply the last step's result; its events come before those of the decision that did not know it."""
        events = overlap.settle(plan)
        if events and not self.running.num:
            events += self._planner.emptied(at_ps)
        self._context.events[:0] = events

    def output_tokens(self, sequence: Sequence) -> int:
        """Return the tokens that a sequence has produced since it joined the batch, committed steps included."""
        return self._batch.output_tokens(sequence)

    # --- what the device did ----------------------------------------------------------------------------------------

    def commit(self, plan: Plan, ran: Ran, *, goes_on: bool = False) -> list[Event]:
        """Advance by the steps that ran. One plan may be committed in several calls, in order.

        Args:
            plan: that they belong to.
            ran: what came of them.
            goes_on: whether the device runs on with this plan, so that a cancel which may have come too late for it to
                stop here has no effect yet.
        """
        batch = self._batch
        events: list[Event] = []
        if self._by_step:
            ran = self._before_output(plan, ran, goes_on)
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
            # Blocks that the last of the steps needed, before anything is added. A step with prompts is the only one of
            # its plan, and its blocks were freed when it was planned.
            if self.prefix_cache is not None and not plan.prefills:
                batch.shrink_cache(ran.num_steps - 1)
            self._decode(ran.num_steps, decoded_ended)
        if self._overlap is not None:
            self._overlap.commit(plan, ran, ended)
            return events
        if plan.prefills and plan.chunk_steps == 1:
            batch.advance_prefills(plan, ran, _NO_ENDS if self._by_step else ended, events)
        if self._by_step and ended:
            decoded_ended = batch.in_order(ended)
        if plan.hold:
            decoded_ended = batch.hold(decoded_ended)
        if decoded_ended:
            for handle, reason in decoded_ended.items():
                if self.options.async_scheduling:
                    batch.end_late(handle, reason, ran.end_ps, events)
                else:
                    batch.finish(handle, reason, ran.end_ps, events)
            events += self._planner.decodes_left(ran.end_ps)
        elif ended and not running.num:
            events += self._planner.emptied(ran.end_ps)
        return events

    def _before_output(self, plan: Plan, ran: Ran, goes_on: bool) -> Ran:
        """Apply what a step-wise scheduler does before it reads the last step's output; return what is left to commit.

        Cancels that came during that step, or with async scheduling before it, free their blocks; then the sequences
        whose ends it did not know when it decided.
        """
        inbox, is_ahead = self._inbox, self.options.async_scheduling
        before_ps = plan.at_ps if is_ahead else ran.end_ps
        if not goes_on and inbox.next_ps is not None and inbox.next_ps < before_ps:
            cancels = inbox.take_cancels(before_ps)
            if cancels and ran.num_steps > 1:  # the cancels came after the others
                self.commit(plan, Ran(ran.num_steps - 1, plan.at_ps))
                self._context.cover([next_chunk(plan.prefills[0])] if plan.prefills else [])
                ran = Ran(1, ran.end_ps, ran.finished, ran.silent, ran.busy_ps)
            ended = {handle for handle, _ in ran.finished}
            for handle in cancels:
                self._apply_cancel(handle, ran.end_ps, int(plan.decode), on_device=handle not in ended)
        if self._batch.ended:
            self._batch.drop_ended()
        return ran

    def _decode(self, num_steps: int, ended: dict[int, FinishReason]) -> None:
        if self._queue_hears:
            try:
                self.queue.decoded(self.running, num_steps)
            except Exception as error:
                self._errors.error = error
        self.running.decode_step += num_steps
        if not self._planner.decodes_on:
            try:
                self.batching.advanced(num_steps)
            except Exception as error:
                self._errors.error = error
        if not self._batch.aborted:
            return
        for handle, sequence in self._batch.aborted.items():
            if handle not in ended:
                ended[handle] = FinishReason.ABORTED
                self._batch.leaves.append(sequence)
        self._batch.aborted.clear()

    def make_room(self, plan: Plan) -> None:
        """Take the prefix cache blocks that the next step of a plan needs; `plan` does so for the first step.

        For a driver that has committed some steps of a plan, and lets others read the replica while the next one runs.
        """
        if self._by_step:
            self._context.cover_next(plan)
        else:
            self._batch.shrink_cache(0)

    # --- adapters ---------------------------------------------------------------------------------------------------

    def _drop_unloadable(self, given_up: frozenset[str]) -> None:
        for sequence in [s for s in self.queue if s.adapter is not None and s.adapter.key in given_up]:
            if self.queue.cancel(sequence.handle) is not None:
                self._context.events.append(Dropped(sequence, DropReason.ADAPTER_LOAD))

    def _put_out_retired(self, at_ps: int) -> None:
        """Unload retiring adapters that no sequence runs with or waits for. Cost: at most one pass of the queue."""
        pins = self.running.adapter_use.pins
        unused = {key: None for key in self.adapters.retiring if key not in pins}
        if not unused:
            return
        for sequence in self.queue:
            if sequence.adapter is not None and sequence.adapter.key in unused:
                del unused[sequence.adapter.key]
                if not unused:
                    return
        for key in unused:
            self.adapters.put_out(key, at_ps)

    # --- policies that raise ----------------------------------------------------------------------------------------

    def clear_waiting(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Empty a queue that has raised; return its sequences and those admitted by a decision that then raised.

        Args:
            sequences: all that this replica has. A queue that has raised is not read.
        """
        try:
            self.queue.clear()
        except Exception as error:  # what the queue may still hold must never run, so it is not used again
            self._errors.error, self._errors.queue_is_broken = error, True
            self._inbox.clear()
        to_come = self._inbox.arrivals()
        return [sequence for sequence in sequences if not self._runs(sequence) and sequence.handle not in to_come]

    def _runs(self, sequence: Sequence) -> bool:
        if sequence.handle in self._batch.ended:
            return False
        return self.running.get(sequence.handle) is not None and sequence not in self._context.admitted

    def give_up(self, sequences: Iterable[Sequence], message: str, error: Exception) -> None:
        """End sequences, not in the queue any more, because of an error; the next decision carries the events."""
        events = self._context.events
        events.append(Raised(message, error))
        for sequence in sequences:
            handle = sequence.handle
            output_tokens = sequence.produced_tokens
            if self._runs(sequence):
                self._batch.leaves.append(sequence)
            if self.running.get(handle) is not None:
                output_tokens += self._batch.output_tokens(sequence)
                self._batch.cancel(sequence)
            events.append(Failed(sequence, message, output_tokens))
        self._context.admitted.clear()

    def idle(self) -> Idle:
        """Return a decision to run nothing before the next event, without calling any policy."""
        idle = Idle(self._inbox.next_ps, self._batch.leaves, self.adapters.take_evicted(), self._context.events)
        self._batch.leaves, self._context.events = [], []
        return idle

    # --- leaving ----------------------------------------------------------------------------------------------------

    def withdraw_waiting(self, at_ps: int) -> tuple[list[Sequence], list[Event]]:
        """Return the waiting sequences, in order of arrival, and keep the running ones (a worker that drains)."""
        return self._inbox.give_back(self._clear_queue(at_ps))

    def lose(self, at_ps: int) -> tuple[list[Sequence], list[Event]]:
        """Empty the replica of a lost worker: return its unfinished sequences in order of arrival, ready to requeue.

        Cancels still in the inbox take effect (see the events). A sequence that had ended but was held (static
        batching) counts as ended.
        """
        unfinished = self._clear_queue(at_ps)
        settled = [] if self._overlap is None else self._overlap.settle(None)
        from_batch, ended = self._batch.lose(at_ps)
        unfinished.update((sequence.handle, sequence) for sequence in from_batch)
        self.adapters.clear(at_ps)
        self._context.admitted.clear()
        self._planner.emptied(at_ps)
        left, cancelled = self._inbox.give_back(unfinished)
        # Cancels that took effect with the last commit, and that no decision has reported.
        unreported = [event for event in self._context.events if isinstance(event, Cancelled | Finished)]
        self._context.events = []
        return left, [*unreported, *settled, *ended, *cancelled]

    def _clear_queue(self, at_ps: int) -> dict[int, Sequence]:
        """Empty the queue; sequences it dropped but kept, or strict S-LoRA has not swept, were reported before."""
        waiting = {one.handle: one for one in self.queue.clear() if not (one.aborted or one.dropped)}
        for sequence in waiting.values():
            sequence.leave_load(at_ps)
        return waiting
