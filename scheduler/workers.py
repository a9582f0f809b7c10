"""One attached worker: the live driver of its replica.

The core decides, this module carries out: it gets a plan from the core, sends it, commits each step's outcome as it
arrives, and plans again when the worker hands back. In between it only passes on inputs: for an arrival or a cancel
that may change the running plan it sends the worker an Interrupt.

Nothing here awaits; messages gather in an outbox that the stream's writer drains.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from lorrery.scheduler import wire_workers
from lorrery.scheduler.core.adapter_events import AdapterLog
from lorrery.scheduler.core.cluster_events import GaveBack, Placed
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.plan import Idle, Plan
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.scheduler.engine_counts import EngineTally
from lorrery.scheduler.fan_out import FanOuts
from lorrery.scheduler.faults import ClusterFaults
from lorrery.scheduler.inputs import Inputs
from lorrery.scheduler.journal import WorkerJournal
from lorrery.scheduler.kv_events import WorkerKvEvents
from lorrery.scheduler.messages import ProtocolError, StepReport, WorkerHello
from lorrery.scheduler.next_decision import NextDecision
from lorrery.scheduler.outbox import Outbox
from lorrery.scheduler.outcomes import Outcomes, RequestOwner
from lorrery.scheduler.running_plan import MAX_AHEAD_PS, RunningPlan
from lorrery.scheduler.told_faults import ToldFaults
from lorrery.scheduler.watch import Loss, Watch
from lorrery.service.clocks import AwakeClock, DeviceClock
from lorrery.vocabulary import u32

INTERNAL = "internal error; the scheduler's log says more"


class Owner(Protocol):
    """What a dispatcher needs of the cluster it belongs to."""

    clock: DeviceClock
    awake: AwakeClock
    faults: ClusterFaults

    @property
    def requests(self) -> RequestOwner:
        """The requests of the scheduler."""
        ...

    def look_for_moves(self) -> None:
        """Balance waiting requests soon."""
        ...

    def given_up(self, worker: "Dispatcher", loss: Loss, text: str, error: Exception | None) -> None:
        """Log and count that a worker's stream is about to end."""
        ...


class Dispatcher:
    """Drives one replica with one worker.

    Args:
        hello: the worker's announcement.
        member: the worker in the core.
        cluster: that it belongs to.
        watch: monitors the worker.
        instance_id: of its process; empty: unknown.
        journal: records its inputs and steps; None: there is no journal.
        kv_events: takes the changes of its prefix cache; None: there are no readers.
        engine: figures of its replica that the worker shows; None: none.

    Attributes:
        loss: why its stream is about to end, as text for the worker; empty: it is not.
        outbox: messages to the worker.
        num_tokens: output tokens since it attached.
        busy_ps: time in steps since then.
    """

    def __init__(
        self,
        hello: WorkerHello,
        member: Member,
        cluster: Owner,
        watch: Watch,
        instance_id: str = "",
        journal: WorkerJournal | None = None,
        kv_events: WorkerKvEvents | None = None,
        engine: EngineTally | None = None,
    ) -> None:
        self.hello = hello
        self.worker_id = hello.worker_id
        self.member = member
        self.watch = watch
        self.instance_id = instance_id
        self.loss = ""
        self._cluster = cluster
        self._clock = cluster.clock
        self._metrics = cluster.requests.metrics
        self._journal = journal
        self._kv_events = kv_events
        self._engine = engine
        self._inputs = Inputs(self._metrics, journal)
        self._running: RunningPlan | None = None
        self._plan_id = 0  # of the last plan
        self._boundary_ps = 0
        self._plans_ahead = member.replica.options.async_scheduling
        self._next_decision = NextDecision(self._clock, partial(self._guarded, self._decide))
        self.outbox = Outbox()
        self._given_up = asyncio.Event()
        self._loads: dict[str, list[asyncio.Future[bool]]] = {}  # on request, by adapter key
        self._adapter_log = member.replica.adapters.log = AdapterLog()
        self.num_tokens = self.busy_ps = self._last_step_ps = 0
        self._told_faults = ToldFaults(self.worker_id, cluster.clock, cluster.faults, journal)
        self._fan_outs = FanOuts(cluster.requests.lives)
        self._outcomes = Outcomes(member, cluster.requests)

    @property
    def replica(self) -> Replica:
        """Its batch and queue; read-only."""
        return self.member.replica

    @property
    def max_total_token_num(self) -> int:
        """Size of its KV pool."""
        return self.member.pool_tokens

    @property
    def draining(self) -> bool:
        """Whether it gets no new sequences."""
        return self.member.draining

    @property
    def kv_source(self) -> wire_workers.KvEventSource | None:
        """Where it publishes KV events; None: nowhere."""
        return None if self._kv_events is None else self._kv_events.source

    @property
    def boundary_ps(self) -> int:
        """The end of its last step."""
        return self._boundary_ps

    @property
    def step_ps(self) -> int:
        """How long its last step took; 0: it is idle."""
        return 0 if self._running is None else self._last_step_ps

    @property
    def computes(self) -> tuple[bool, bool]:
        """Whether the current step computes prompts, and whether it decodes."""
        if self._running is None:
            return False, False
        plan = self._running.plan
        return bool(plan.prefills), plan.decode

    # --- inputs from requests ---------------------------------------------------------------------------------------

    def placed(self, event: Placed, at_ps: int) -> None:
        """Handle a request that the core has given this worker."""
        expected = self._expects(at_ps, event.matters)
        if self._engine is not None:
            self._engine.placed(event.sequence)
        self._inputs.placed(event, at_ps, expected=expected, lost=bool(self.loss))
        self._guarded(self._nudge, at_ps, event.matters)

    def withdrawn(self, sequence: Sequence, at_ps: int) -> None:
        """Handle a request of this worker that has been cancelled."""
        self._inputs.withdrawn(sequence, at_ps, lost=bool(self.loss))
        self._guarded(self._nudge, at_ps, True)

    def recalled(self, handle: int, to: str, at_ps: int) -> None:
        """Handle a waiting request of this worker that is to move to another."""
        self._inputs.recalled(handle, to, at_ps, lost=bool(self.loss))
        self._guarded(self._nudge, at_ps, True)

    def retired(self, adapter_key: str, at_ps: int) -> None:
        """Release an adapter that no further request will name, once no sequence has it."""
        if self.member.retire(adapter_key, at_ps):
            self._inputs.retired(adapter_key, at_ps, lost=bool(self.loss))
            self._guarded(self._nudge, at_ps, True)

    def load(self, adapter: Adapter, at_ps: int) -> asyncio.Future[bool] | None:
        """Load an adapter on request; None: this worker loads none.

        Returns:
            Whether the load succeeded; also true if the worker drains or is gone first, and so needs no adapter.
        """
        if self.loss or not self.member.load(adapter, at_ps):
            return None
        over = asyncio.get_running_loop().create_future()
        self._loads.setdefault(adapter.key, []).append(over)
        self._inputs.load(adapter, at_ps, lost=False)
        self._guarded(self._nudge, at_ps, True)
        return over

    def _end_loads(self, adapter_key: str, *, loaded: bool) -> None:
        for over in self._loads.pop(adapter_key, ()):
            if not over.done():
                over.set_result(loaded)

    def _end_all_loads(self) -> None:
        for adapter_key in list(self._loads):
            self._end_loads(adapter_key, loaded=True)

    def _expects(self, at_ps: int, heeded: bool) -> bool:
        """Return whether an input should take effect at the next boundary."""
        return heeded or self._running is None or self._inputs.effects.missed(at_ps)

    def _nudge(self, at_ps: int, heeded: bool) -> None:
        running = self._running
        if self.loss:
            return
        if running is None:
            self._next_decision.soon(at_ps)
        elif heeded and running.steps_left > 1 and not running.interrupted:
            running.interrupted = True
            self.outbox.send(wire_workers.interrupt(running.plan_id, at_ps))

    # --- failing ----------------------------------------------------------------------------------------------------

    def give_up(self, loss: Loss, text: str, error: Exception | None = None) -> None:
        """End the worker's stream; its sequences go elsewhere, and later messages of the worker are dropped.

        Args:
            loss: why, for the metrics.
            text: the reason as text for the worker and the log.
            error: the exception, if that is the reason.
        """
        if not self.loss:
            self.stop()
            self.loss = text
            self._cluster.given_up(self, loss, text, error)
            self._given_up.set()

    async def until_given_up(self) -> None:
        """Return once the stream has to end."""
        await self._given_up.wait()

    def _guarded(self, act: Callable[..., None], *args: object) -> None:
        """Call `act` for another stream or the loop; an error in it ends only this worker's stream."""
        try:
            act(*args)
        except Exception as error:
            self.give_up(Loss.ERROR, INTERNAL, error)

    # --- deciding ---------------------------------------------------------------------------------------------------

    def _decide(self, at_ps: int, *, after_step: bool = False) -> None:
        """Plan at this boundary, or as soon as there is something to do; `after_step`: at the end of a step."""
        assert self._running is None, f"plan {self._plan_id} runs"
        at_ps = max(at_ps, self._boundary_ps)
        while True:
            self._next_decision.cancel()
            started = time.thread_time()
            decision = self.member.plan(at_ps)
            self._metrics.plan_seconds.observe(time.thread_time() - started)
            self._note_adapters()
            self._inputs.decided(decision, at_ps)
            if self._engine is not None:
                self._engine.happened(decision.events)
            if isinstance(decision, Idle) or (after_step and self._plans_ahead):
                self._tell_kv_events()
            due_ps = self._begin(decision, at_ps)
            # Only now: a sequence that has left may come back to this worker, and would change the decision just made.
            self._outcomes.carry_out(decision.events, at_ps)
            if self.member.changed:
                self.member.changed = False
                self._cluster.look_for_moves()
            if due_ps is None:
                return
            after_step = after_step and due_ps == at_ps  # what has ended has left, and nothing else
            at_ps = due_ps

    def _begin(self, decision: Plan | Idle, at_ps: int) -> int | None:
        """Send a plan, or wait; return when to decide again if that has already passed."""
        if isinstance(decision, Plan):
            self._start(decision)
            return None
        if decision.leaves or decision.adapter_evictions:
            self._plan_id += 1
            self.outbox.send(wire_workers.write_leaves(decision, self._plan_id, at_ps, self._clock.now_ps()))
        if decision.until_ps is not None and decision.until_ps <= self._clock.now_ps():
            return decision.until_ps
        self._next_decision.wait(decision.until_ps)
        return None

    def _note_adapters(self) -> None:
        """Count the events of its adapters, record them in the history, and end loads on request."""
        for adapter_key, loaded in self.replica.adapters.take_answers():
            self._end_loads(adapter_key, loaded=loaded)
        events = self._adapter_log.take()
        if not events:
            return
        self._metrics.adapters_changed(events)
        if self._engine is not None:
            self._engine.adapters_changed(events)
        if (history := self._cluster.requests.history) is not None:
            history.adapters_changed(self.worker_id, events)

    def _start(self, plan: Plan) -> None:
        self._plan_id += 1
        self._running = RunningPlan(plan, self._plan_id)
        now_ps = self._clock.now_ps()
        message = wire_workers.write_plan(
            plan,
            self._plan_id,
            now_ps,
            self._cluster.requests.lives.__getitem__,
            self.hello.needs_prompts,
            None if self._engine is None else self._engine.take(now_ps),
        )
        self._metrics.plans.inc()
        self.watch.has_plan(self._plan_id, self._cluster.awake.now())
        self.outbox.send(message)

    # --- reports of the worker --------------------------------------------------------------------------------------

    def heard(self) -> None:
        """Record a message of any kind."""
        self.watch.heard(self._cluster.awake.now())

    def answer(self, number: int, now_ps: int) -> None:
        """Answer a heartbeat."""
        engine = None if self._engine is None else self._engine.take(now_ps, only_changes=True)
        self.outbox.send(wire_workers.heartbeat_answer(number, now_ps, engine))

    def promised(self, plan_id: int, end_ps: int) -> None:
        """Record when the current step ends by the worker's report."""
        in_seconds = self._clock.to_monotonic(end_ps) - time.monotonic()
        self.watch.promised(plan_id, in_seconds, self._cluster.awake.now())

    def step_done(self, step: StepReport) -> None:
        """Commit one step, pass its tokens on, and plan again if the worker hands back."""
        running = self._running
        if running is None or step.plan_id != running.plan_id:
            return
        running.check(step, self._boundary_ps, self._clock.now_ps)
        self.watch.progressed(self._cluster.awake.now())
        if step.ran.end_ps > step.start_ps:
            self._commit(running, step)
        if step.hand_back:
            self._running = None
            self.watch.has_no_plan()
            self._boundary_ps = step.ran.end_ps
            self._decide(step.ran.end_ps, after_step=True)

    def _commit(self, running: RunningPlan, step: StepReport) -> None:
        plan, ran, num_tokens = running.plan, step.ran, len(step.handles_u32) // u32.ITEM_BYTES
        step_ps, gap_ps = ran.end_ps - step.start_ps, step.start_ps - running.expected_start_ps(self._boundary_ps)
        replica = self.member.replica
        fan_out = self._fan_outs.note(step, running, replica.running, replica.ended)
        running.steps_left -= 1
        self.num_tokens += num_tokens
        self.busy_ps += step_ps
        self._last_step_ps = step_ps
        self._boundary_ps = ran.end_ps
        self._inputs.effects.stepped(ran.end_ps)
        started = time.thread_time()
        try:
            events = self.member.commit(plan, ran, goes_on=not step.hand_back)
        except Exception:
            fan_out.take_back()  # these tokens will be produced again elsewhere
            raise
        if not self._plans_ahead:
            self._tell_kv_events()
        if not step.hand_back:
            replica.make_room(plan)  # the next step begins: readers must not find blocks that it takes
            if self._plans_ahead:
                self._tell_kv_events()
        cpu_seconds = time.thread_time() - started
        self._note_adapters()
        fan_out.send(step.token_ids_u32, step_ps)
        self._metrics.step(plan, step_ps, gap_ps, num_tokens, cpu_seconds)
        if self._journal is not None:
            self._journal.stepped(step, gap_ps, events)
        if self._engine is not None:
            self._engine.happened(events)
        self._outcomes.carry_out(events, ran.end_ps)

    def _tell_kv_events(self) -> None:
        """Send readers the changes since the last call, when a step ends.

        A scheduler that decides ahead has then decided the next step, whose changes are among them, as with vLLM.
        """
        if self._kv_events is not None and (message := self._kv_events.take()) is not None:
            self.outbox.send(message)

    # --- faults on request ------------------------------------------------------------------------------------------

    def let_go_wrong(self, rules: list[str], *, add: bool = False, from_ps: int | None = None) -> None:
        """Send the worker an operator's faults, in place of the last ones or beside them; it reports when they begin.

        Args:
            rules: a text each.
            add: whether those that it was sent before stay active.
            from_ps: start of their times; None: when the worker takes them.
        """
        try:
            message = self._told_faults.tell(rules, add=add, from_ps=from_ps)
        except ProtocolError as error:
            self.give_up(Loss.PROTOCOL, str(error))
        else:
            if message is not None:
                self.outbox.send(message)

    def faults_taken(self, from_ps: int) -> None:
        """Record from when the faults that the worker was sent hold.

        Raises:
            ProtocolError: it was sent none, or the time is impossible.
        """
        latest_ps = max(self._boundary_ps, self._clock.now_ps()) + MAX_AHEAD_PS
        self._told_faults.taken(from_ps, self._boundary_ps, latest_ps)

    # --- being gone -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop deciding; the worker is gone."""
        self._next_decision.cancel()
        self._running = None
        self._end_all_loads()

    def lost(self, gave_back: GaveBack, at_ps: int) -> None:
        """Handle what the core has taken back from a worker that is gone."""
        self._note_adapters()
        self._inputs.lost(gave_back, at_ps)
        self._outcomes.carry_out(gave_back.events, at_ps)

    def drained(self, gave_back: GaveBack, at_ps: int) -> None:
        """Handle what the core has taken back while the rest runs on."""
        self._inputs.drained(gave_back, at_ps)
        self._end_all_loads()
        if self._engine is not None:
            self._engine.happened(gave_back.events)
            self._engine.gave_back(gave_back.sequences)
        self._outcomes.carry_out(gave_back.events, at_ps)

    def flush_journal(self) -> None:
        """See `Inputs`."""
        self._inputs.flush_journal()
