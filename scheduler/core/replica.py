"""One worker as the scheduler sees it: its share of the queue, its running batch, its adapters, its prefix cache.

`submit` and `cancel` put an event into an inbox and nothing else. `plan` applies the events stamped at or before the
boundary, in (time, sequence number) order, and then decides: admission, eviction and batch choice happen there and
nowhere else. `commit` notes what the device did. `lose` gives back what is unfinished when the worker is gone.

No clock here: every time comes in as an argument, in device picoseconds.
"""

from collections.abc import Iterable
from heapq import heappop, heappush

from scheduler.core.batching.base import Batching, Decode, Prefill
from scheduler.core.plan import (
    AdaptersKept,
    Admitted,
    Cancelled,
    Chunk,
    EndReason,
    Event,
    Finished,
    FirstToken,
    Idle,
    Plan,
    Ran,
)
from scheduler.core.prefix_cache.base import PrefixCache, usable_tokens
from scheduler.core.running import Running
from scheduler.core.sequence import Adapter, Sequence


class Replica:
    """A worker's batch and queue.

    Args:
        batching: chooses each next step, and holds the queue.
        prefix_cache: what is computed already; None: nothing.
        strict: S-LoRA's way with cancelled requests: one more step, then out.
        no_lora: serve every request from the base model and move no adapter (S-LoRA's `--no-lora`).
        min_computed_tokens: prompt tokens that are computed even if the whole prompt is cached: 1, or 0 as in llm-mock.
    """

    def __init__(
        self,
        batching: Batching,
        *,
        prefix_cache: PrefixCache | None = None,
        strict: bool = False,
        no_lora: bool = False,
        min_computed_tokens: int = 1,
    ) -> None:
        self.batching = batching
        self.queue = batching.queue
        self.prefix_cache = prefix_cache
        self.strict = strict
        self.no_lora = no_lora
        self.min_computed_tokens = min_computed_tokens
        self.running = Running()
        self.prefilling: dict[int, Sequence] = {}
        self.resident_adapters: dict[str, Adapter] = {}
        self.num_adapter_loads = 0
        self._inbox: list[tuple[int, int, Sequence | int]] = []
        self._num_received = 0
        self._leaves: list[Sequence] = []
        self._aborted: dict[int, Sequence] = {}
        self._evictions: list[str] = []

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, in the queue or still in the inbox."""
        return len(self.queue) + sum(isinstance(what, Sequence) for _, _, what in tuple(self._inbox))

    @property
    def num_running(self) -> int:
        """Sequences in the batch, those in prefill included."""
        return len(self.running) + len(self.prefilling)

    @property
    def kv_tokens(self) -> int:
        """Tokens that sequences in the batch hold."""
        return self.running.kv_tokens + sum(sequence.input_tokens for sequence in tuple(self.prefilling.values()))

    # --- events in --------------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence, at_ps: int) -> None:
        """Hand in a sequence; it is seen at the first boundary at or after `at_ps`."""
        self._receive(at_ps, sequence)

    def cancel(self, handle: int, at_ps: int) -> None:
        """Withdraw a sequence; unknown handles are ignored, since it may just have finished."""
        self._receive(at_ps, handle)

    def _receive(self, at_ps: int, what: Sequence | int) -> None:
        heappush(self._inbox, (at_ps, self._num_received, what))
        self._num_received += 1

    def heeds_arrivals(self) -> bool:
        """Tell whether an arrival may change the plan that runs; a cancel always may."""
        return self.batching.heeds_arrivals(self.running)

    # --- deciding ---------------------------------------------------------------------------------------------------

    def plan(self, at_ps: int) -> Plan | Idle:
        """Decide what runs from this boundary on."""
        events = self._apply_inbox(at_ps)
        next_event_ps = self._inbox[0][0] if self._inbox else None
        choice = self.batching.choose(self.running, at_ps)
        plan: Plan | Idle
        if isinstance(choice, Prefill):
            plan = self._plan_prefill(choice.admitted, at_ps)
        elif isinstance(choice, Decode):
            max_steps = 1 if self._aborted else choice.max_steps
            plan = Plan(
                at_ps, max_steps, next_event_ps, decode=True, adapter_prefetches=() if self.no_lora else choice.prefetch
            )
            if not self.no_lora:
                self._make_resident(choice.prefetch)
        else:
            until = [time for time in (choice.until_ps, next_event_ps) if time is not None]
            plan = Idle(min(until, default=None))
        plan.leaves, self._leaves = self._leaves, []
        plan.adapter_evictions = tuple(name for name in self._evictions if name not in self.resident_adapters)
        self._evictions = []
        plan.events[:0] = events
        return plan

    def _apply_inbox(self, at_ps: int) -> list[Event]:
        events: list[Event] = []
        while self._inbox and self._inbox[0][0] <= at_ps:
            _, _, what = heappop(self._inbox)
            if isinstance(what, Sequence):
                self.queue.append(what, at_ps)
            else:
                self._apply_cancel(what, at_ps, events)
        return events

    def _apply_cancel(self, handle: int, at_ps: int, events: list[Event]) -> None:
        sequence = self.running.get(handle)
        if sequence is None:
            waiting = self.queue.cancel(handle)
            if waiting is not None:
                events.append(Cancelled(waiting))
        elif self.strict:
            sequence.aborted = True
            self._aborted[handle] = sequence
        else:
            self.running.leave(sequence)
            self._leaves.append(sequence)
            events.append(Cancelled(sequence))
            events.extend(self._offload(at_ps))

    def _plan_prefill(self, admitted: list[Sequence], at_ps: int) -> Plan:
        plan = Plan(at_ps, 1, joins=admitted)
        needed: set[Adapter] = set()
        for sequence in admitted:
            sequence.admitted_ps = at_ps
            sequence.cached_tokens = usable_tokens(self.prefix_cache, sequence, self.min_computed_tokens)
            self.prefilling[sequence.handle] = sequence
            if sequence.adapter is not None:
                needed.add(sequence.adapter)
            new_tokens = sequence.input_tokens - sequence.cached_tokens
            plan.prefills.append(Chunk(sequence, new_tokens, sequence.cached_tokens, samples=True))
            plan.events.append(Admitted(sequence))
        if not self.no_lora:
            plan.adapter_loads = tuple(sorted(needed))
            self._make_resident(plan.adapter_loads)
        return plan

    def _make_resident(self, adapters: Iterable[Adapter]) -> None:
        for adapter in adapters:
            if adapter.adapter_id not in self.resident_adapters:
                self.resident_adapters[adapter.adapter_id] = adapter
                self.num_adapter_loads += 1

    # --- what the device did ----------------------------------------------------------------------------------------

    def commit(self, plan: Plan, ran: Ran) -> list[Event]:
        """Advance by the steps that ran. Call it once or several times for one plan, in order."""
        if plan.decode:
            return self._commit_decode(ran)
        return self._commit_prefill(plan, ran)

    def _commit_prefill(self, plan: Plan, ran: Ran) -> list[Event]:
        events: list[Event] = []
        ended = dict(ran.finished)
        for sequence in plan.joins:
            self.prefilling.pop(sequence.handle)
            if sequence.first_token_ps is None and not sequence.produced_tokens:
                sequence.first_token_ps = ran.end_ps
                events.append(FirstToken(sequence, ran.end_ps))
            reason = ended.get(sequence.handle)
            if reason is None:
                self.running.join(sequence)
            else:
                events.append(Finished(sequence, reason, sequence.produced_tokens + 1, ran.end_ps))
        # S-LoRA offloads nothing after a prefill, unless nobody is left.
        if not len(self.running):
            self.batching.emptied(ran.end_ps)
            events.extend(self._keep_adapters(()))
        return events

    def _commit_decode(self, ran: Ran) -> list[Event]:
        events: list[Event] = []
        running = self.running
        running.advance(ran.num_steps)
        self.batching.advanced(ran.num_steps)
        ended = dict(ran.finished)
        for handle, sequence in self._aborted.items():
            if handle not in ended:
                ended[handle] = EndReason.ABORTED
                self._leaves.append(sequence)
        self._aborted.clear()
        if not ended:
            return events
        for handle, reason in ended.items():
            ending = running.get(handle)
            assert ending is not None, f"the device ended sequence {handle}, which does not run"
            output_tokens = ending.produced_tokens + ending.output_tokens(running.decode_step)
            running.leave(ending)
            events.append(Finished(ending, reason, output_tokens, ran.end_ps))
        events.extend(self._offload(ran.end_ps))
        return events

    def _offload(self, at_ps: int) -> list[Event]:
        """Put out the adapters that nobody uses any more, after sequences have left the running batch."""
        events = self._keep_adapters(tuple(sorted(self.running.adapter_ids)))
        if not len(self.running):
            self.batching.emptied(at_ps)
            events += self._keep_adapters(())
        return events

    def _keep_adapters(self, adapter_ids: tuple[str, ...]) -> list[Event]:
        if self.no_lora:
            return []
        self._evictions += [name for name in self.resident_adapters if name not in adapter_ids]
        self.resident_adapters = {name: self.resident_adapters[name] for name in adapter_ids}
        return [AdaptersKept(adapter_ids)]

    # --- leaving ----------------------------------------------------------------------------------------------------

    def withdraw_waiting(self) -> tuple[list[Sequence], list[Event]]:
        """Give back what waits, in order of arrival, and keep what runs (a worker that drains)."""
        return self._give_back(self._clear_queue())

    def lose(self, at_ps: int) -> tuple[list[Sequence], list[Event]]:
        """Forget the worker: give back the unfinished sequences in order of arrival, ready to be queued elsewhere.

        Cancels that were still in the inbox take effect (the events tell); the replica is empty afterwards.
        """
        unfinished = self._clear_queue()
        for sequence in self.prefilling.values():
            sequence.requeue(None)
            unfinished[sequence.handle] = sequence
        for sequence in list(self.running):
            self.running.leave(sequence)
            sequence.requeue(self.running.decode_step)
            unfinished[sequence.handle] = sequence
        self.prefilling.clear()
        self.resident_adapters.clear()
        self._leaves.clear()
        self._aborted.clear()
        self._evictions.clear()
        self.batching.emptied(at_ps)
        return self._give_back(unfinished)

    def _clear_queue(self) -> dict[int, Sequence]:
        """Empty the queue; those that strict S-LoRA has not swept yet were told of when they were cancelled."""
        return {sequence.handle: sequence for sequence in self.queue.clear() if not sequence.aborted}

    def _give_back(self, unfinished: dict[int, Sequence]) -> tuple[list[Sequence], list[Event]]:
        """Add the inbox's arrivals to `unfinished`, and take out what was cancelled."""
        cancelled: set[int] = set()
        kept: list[tuple[int, int, Sequence | int]] = []
        for event in sorted(self._inbox, key=lambda event: event[:2]):
            what = event[2]
            if isinstance(what, Sequence):
                unfinished[what.handle] = what
            elif what in unfinished:
                cancelled.add(what)
            else:
                kept.append(event)
        self._inbox = kept
        ordered = sorted(unfinished.values(), key=lambda sequence: (sequence.arrived_ps, sequence.handle))
        gone = [sequence for sequence in ordered if sequence.aborted or sequence.handle in cancelled]
        return [sequence for sequence in ordered if sequence not in gone], [Cancelled(sequence) for sequence in gone]
