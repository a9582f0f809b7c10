"""Decides what a replica's worker runs from a boundary on, and how long the decision holds.

The way to batch chooses the step and admits waiting sequences (`core.batch_context`). The planner derives the rest: for
how many steps and until when the choice stands, and which adapters it needs or should load meanwhile. Events up to the
boundary have already taken effect (`core.replica`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from lorrery.scheduler.core.adapters.loads import Ahead
from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.batch import Batch
from lorrery.scheduler.core.batch_context import ReplicaBatchContext
from lorrery.scheduler.core.batching.base import Step, decodes_on
from lorrery.scheduler.core.checked.base import PolicyErrors, original
from lorrery.scheduler.core.facts import AdaptersKept, Event
from lorrery.scheduler.core.inbox import Inbox
from lorrery.scheduler.core.memory.on_demand import OnDemandMemory
from lorrery.scheduler.core.plan import Idle, Plan
from lorrery.scheduler.core.protocols import Batching, Queue
from lorrery.scheduler.core.queues.base import goes_by_arrival, is_asked_every_step
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.worker.device.deployment import NO_FRONT_END, FrontEndCost


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Options of a replica that do not belong to its policy.

    Attributes:
        strict: S-LoRA's handling of a cancelled running request: one more step, then out.
        takes_all: let a request that could never fit wait for ever, as vLLM does, instead of refusing it.
        no_lora: serve every request from the base model and move no adapter (S-LoRA's `--no-lora`).
        min_computed_tokens: prompt tokens that are computed even if the whole prompt is cached: 1, or 0 as in llm-mock.
        max_overtakes: how many sequences may overtake one that waits for its adapter, if the queue allows it; None: any
            number.
        look_ahead: number of waiting sequences, first in queue order, whose adapters are loaded ahead.
        async_scheduling: whether a step is decided while the one before it runs (vLLM, with `memory.on_demand`): events
            during that step have effect one step later. A sequence that it ends keeps what it holds meanwhile, and
            takes part once more unless its length is what ended it.
        overlap: whether a step's result is known one decision late, see `core.overlap`.
        front_end: work on requests before they reach the queue.
    """

    strict: bool = False
    takes_all: bool = False
    no_lora: bool = False
    min_computed_tokens: int = 1
    max_overtakes: int | None = 0
    look_ahead: int = 0
    async_scheduling: bool = False
    overlap: bool = False
    front_end: FrontEndCost = NO_FRONT_END


PLAIN = ReplicaOptions()
"""The defaults."""


class Planner:
    """See the module.

    Args:
        batch: running sequences and what each holds.
        context: the replica as the way to batch sees it.
        queue: waiting sequences.
        batching: chooses each next step.
        adapters: adapters on the GPU.
        inbox: events that take effect later.
        options: of the replica.
        errors: receives what the queue raises after a decision is made.

    Attributes:
        decodes_on: whether the way to batch need not be called while nothing waits, see `batching.base.decodes_on`.
        holds: whether nothing can join the running batch.
    """

    def __init__(
        self,
        batch: Batch,
        context: ReplicaBatchContext,
        queue: Queue,
        batching: Batching,
        adapters: Residency,
        inbox: Inbox,
        options: ReplicaOptions,
        errors: PolicyErrors,
    ) -> None:
        self.decodes_on = decodes_on(batching)
        self.holds = False
        self._batch = batch
        self._running = batch.running
        self._memory = batch.memory
        self._may_preempt = not batch.memory.reserved
        self._on_demand = batch.memory if isinstance(batch.memory, OnDemandMemory) else None
        self._context = context
        self._queue = queue
        self._batching = batching
        self._adapters = adapters
        self._uses_adapters = not options.no_lora
        self._evicts_unused = not (options.no_lora or adapters.options.keep_unused)
        self._inbox = inbox
        self._errors = errors
        self._one_step = is_asked_every_step(queue)
        self._max_sequences = batching.limits.max_sequences if self.decodes_on else 0
        self._look_ahead = 0 if options.no_lora else options.look_ahead
        listed = original(queue)
        self._listed = listed if goes_by_arrival(listed) else None
        # The sequences last looked ahead to. All loads for them that can begin have begun, for as long as the residency
        # stays the same and, if an adapter lacks a place, the batch too.
        self._looked_at: list[Sequence] = []
        self._ahead = Ahead(())
        self._looked_at_version = self._looked_at_batch = -1

    def decide(self, at_ps: int) -> Plan | Idle:
        """Return what runs from this boundary on; the replica adds its own events.

        Raises:
            Exception: whatever a policy raised.
        """
        running, context = self._running, self._context
        if (
            self.decodes_on
            and running.num
            and not running.prefilling
            and (context.at_rest or context.has_no_candidates())
            and (self._on_demand is None or self._may_decode_on(self._on_demand))
        ):
            return self._decode_on(at_ps)
        choice = self._batching.choose(context, at_ps)
        if self._look_ahead and context.adapters_awaited and self._adapters.has_free_load:
            self._load_ahead(at_ps)
        if isinstance(choice, Step):
            return self._plan_step(choice, at_ps)
        return Idle(_earlier(choice.until_ps, self._next_event_ps(at_ps)))

    def _may_decode_on(self, memory: OnDemandMemory) -> bool:
        """Return whether the coming step needs no pass of vLLM's: all have blocks, and some have not ended."""
        return memory.steps_before_full(self._running, 1) == 1 and self._running.num > len(self._batch.ended)

    def _decode_on(self, at_ps: int) -> Plan:
        """Return what the way to batch would choose (`decodes_on`) while nothing waits and nothing is in prefill.

        More than half of a simulation's boundaries take this path. A queue at rest does not change with time alone.
        """
        running, adapters = self._running, self._adapters
        self._context.blocked = running.num >= self._max_sequences
        self.holds = False
        max_steps, next_ps = running.steps_to_length(), self._inbox.next_ps
        if max_steps > 1:
            is_due = next_ps is not None and next_ps <= at_ps
            if self._batch.aborted or self._one_step or is_due or self._batch.ended:
                max_steps = 1
            elif self._may_preempt:
                max_steps = self._memory.steps_before_full(running, max_steps)
        plan = Plan(at_ps, max_steps, decode=True)
        if self._on_demand is not None:
            self._context.cover_next(plan)
        plan.until_ps = next_ps if adapters.next_event_ps is None else _earlier(next_ps, adapters.next_event_ps)
        return plan

    def _load_ahead(self, at_ps: int) -> None:
        """Begin adapter loads for the first waiting sequences; a queue at rest has no candidates and loads nothing."""
        residency, batch_version = self._adapters, self._running.version
        try:
            if self._context.has_no_candidates():
                return
            if self._listed is not None:
                first = self._listed.front(self._look_ahead)
            else:
                first = list(islice(self._queue, self._look_ahead))
        except Exception as error:  # as in `_next_event_ps`
            self._errors.error = error
            return
        if first is not self._looked_at and first != self._looked_at:
            self._looked_at = first
            self._ahead = Ahead([one.adapter for one in first if one.adapter is not None])
        elif residency.version == self._looked_at_version and self._looked_at_batch in (-1, batch_version):
            return
        wants_place = bool(self._ahead.adapters) and residency.load_ahead(self._ahead, at_ps)
        self._looked_at_version = residency.version
        self._looked_at_batch = batch_version if wants_place else -1  # a place may become free when a sequence leaves

    def _plan_step(self, step: Step, at_ps: int) -> Plan:
        max_steps = step.max_steps
        if max_steps > 1:
            one_step = self._one_step or self._batch.aborted or self._inbox.due(at_ps)
            max_steps = 1 if one_step else self._memory.steps_before_full(self._running, max_steps)
        self.holds = step.hold
        plan = Plan(at_ps, max_steps, step.chunks, decode=step.decode, hold=step.hold)
        if step.chunk_steps > 1 and self._may_stretch(at_ps):
            plan.chunk_steps = step.chunk_steps
            if self._on_demand is not None:
                plan.chunk_steps = self._on_demand.chunks_before_full(self._running, step.chunks[0], step.chunk_steps)
            elif step.decode:
                plan.chunk_steps = self._memory.steps_before_full(self._running, step.chunk_steps)
        context, adapters = self._context, self._adapters
        if context.admitted:
            plan.joins, context.admitted = context.admitted, []
            if self._uses_adapters:
                loads = {s.adapter for s in plan.joins if s.adapter is not None}
                if loads:
                    plan.adapter_loads = tuple(sorted(loads))
                    if adapters.options.blocking:
                        self._await_adapters(plan.joins, at_ps)
                    plan.wait_ps = adapters.wait_ps(plan.adapter_loads, at_ps)
        if step.loads:
            self._load_for_step(plan, step.loads, at_ps)
        if step.prefetch and self._uses_adapters:
            plan.adapter_prefetches = step.prefetch
            for adapter in step.prefetch:
                adapters.prefetch(adapter, at_ps)
        plan.until_ps = self._next_event_ps(at_ps)
        return plan

    def _load_for_step(self, plan: Plan, loads: tuple[Adapter, ...], at_ps: int) -> None:
        """Let a plan's first step wait for adapters, of joining sequences or not, whose load has begun."""
        plan.adapter_loads = tuple(sorted({*plan.adapter_loads, *loads}))
        plan.wait_ps = max(plan.wait_ps, self._adapters.wait_ps(loads, at_ps))

    def _may_stretch(self, at_ps: int) -> bool:
        """Return whether consecutive chunks of one long prompt may run without a new decision."""
        return self.decodes_on and not (self._batch.aborted or self._one_step or self._inbox.due(at_ps))

    def _await_adapters(self, joins: Iterable[Sequence], at_ps: int) -> None:
        """Note on joining sequences that they wait for their adapters for as long as their first step does."""
        adapters = self._adapters
        for sequence in joins:
            if sequence.adapter is not None and sequence.adapter.key not in adapters.gpu:
                sequence.await_adapter(adapters.load_end(sequence.adapter), at_ps)

    # --- what a departure brings about --------------------------------------------------------------------------------

    def decodes_left(self, at_ps: int) -> list[Event]:
        """Handle sequences that have left after decoding, by their end or a cancel.

        S-LoRA evicts unused adapters then, and after a prefill only if the batch is empty; twice if the batch became
        empty (`tests/golden/router_loop.jsonl`).
        """
        events: list[Event] = []
        if self._evicts_unused:
            events += self._keep_adapters(tuple(sorted(self._running.adapter_keys)), at_ps)
        if not self._running.num:
            events += self.emptied(at_ps)
        return events

    def emptied(self, at_ps: int) -> list[Event]:
        """Handle the departure of the last sequence."""
        try:
            self._batching.emptied(at_ps)
        except Exception as error:
            self._errors.error = error
        return self._keep_adapters((), at_ps) if self._evicts_unused else []

    def _keep_adapters(self, adapter_keys: tuple[str, ...], at_ps: int) -> list[Event]:
        self._adapters.keep_only(adapter_keys, at_ps)
        return [AdaptersKept(adapter_keys)]

    def _next_event_ps(self, at_ps: int) -> int | None:
        next_ps = _earlier(self._inbox.next_ps, self._adapters.next_event_ps)
        if self._adapters.has_news:
            return at_ps
        if self._errors.error is not None:
            return at_ps
        try:
            wakes_at_ps = self._queue.wakes_at_ps(at_ps)
        except Exception as error:  # the next decision, due at once, raises it
            self._errors.error = error
            return at_ps
        return next_ps if wakes_at_ps is None else _earlier(next_ps, wakes_at_ps)


def _earlier(one: int | None, other: int | None) -> int | None:
    if one is None:
        return other
    return one if other is None or one <= other else other
