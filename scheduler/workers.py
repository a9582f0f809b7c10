"""One attached worker: the live driver of its replica.

The core decides, this module carries out: it gets a plan from the core, sends it, commits each step's outcome as it
arrives, and plans again when the worker hands back. In between it only passes on inputs: for an arrival or a cancel
that may change the running plan it sends the worker an Interrupt.

Nothing here awaits; messages gather in an outbox that the stream's writer drains.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from lorrery.scheduler import wire_workers
from lorrery.scheduler.core.adapters.loads import AdapterLog
from lorrery.scheduler.core.cluster_facts import GaveBack, Placed, Withdrawn
from lorrery.scheduler.core.facts import Cancelled, Facts, Failed, Finished
from lorrery.scheduler.core.inbox import LoadOnRequest, Recall, Retire
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.plan import Idle, Plan
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter
from lorrery.scheduler.facts import Decided, Input, InputLate, Stepped
from lorrery.scheduler.faults import ClusterFaults, ToldFaults
from lorrery.scheduler.liveness import Loss, Watch
from lorrery.scheduler.messages import ProtocolError, StepReport, WorkerHello
from lorrery.scheduler.requests import Requests
from lorrery.scheduler.steps import MAX_AHEAD_PS, FanOuts, Inputs, RunningPlan
from lorrery.scheduler.subscribers.engine_counts import EngineTally
from lorrery.scheduler.subscribers.kv_events import WorkerKvEvents
from lorrery.scheduler.wire_workers import ToWorker
from lorrery.service.clocks import DeviceClock, UptimeClock
from lorrery.vocabulary import u32

INTERNAL = "internal error; the scheduler's log says more"


class Outbox:
    """Messages to one worker, in order, until its stream's writer takes them."""

    def __init__(self) -> None:
        self._messages: deque[ToWorker] = deque()
        self._wake = asyncio.Event()

    def send(self, message: ToWorker) -> None:
        """Queue a message; never waits."""
        self._messages.append(message)
        self._wake.set()

    async def write_all(self, write: Callable[[ToWorker], Awaitable[None]]) -> None:
        """Write queued messages, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._messages:
                await write(self._messages.popleft())


class NextDecision:
    """When the next decision for a worker without a plan is due: in the loop's next turn, or at a given time.

    Not at once, even if it idles: inputs that come together, such as a lost worker's sequences, share one decision.

    Args:
        clock: the device clock.
        decide: called with the time to decide at; must not raise.
    """

    def __init__(self, clock: DeviceClock, decide: Callable[[int], None]) -> None:
        self._clock = clock
        self._decide = decide
        self._until_ps: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._soon_ps = 0

    def soon(self, at_ps: int) -> None:
        """Decide soon, at this time, or at the awaited one if that is earlier: its timer may fire late."""
        if self._soon is None:
            until_ps = self._until_ps
            self.cancel()
            first_ps = at_ps if until_ps is None else min(at_ps, until_ps)
            self._soon = asyncio.get_running_loop().call_soon(self._decide, first_ps)
            self._soon_ps = first_ps

    def settle(self) -> None:
        """Decide now what would be decided soon."""
        if self._soon is not None:
            self.cancel()
            self._decide(self._soon_ps)

    def wait(self, until_ps: int | None) -> None:
        """Decide at this time; None: not before an input comes."""
        self._until_ps = until_ps
        if until_ps is not None:
            delay = self._clock.to_monotonic(until_ps) - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, delay), self._decide, until_ps)

    def cancel(self) -> None:
        """Cancel the pending decision."""
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self._timer = self._soon = None
        self._until_ps = None


class Owner(Protocol):
    """What a dispatcher needs of the cluster it belongs to."""

    clock: DeviceClock
    uptime: UptimeClock
    faults: ClusterFaults

    facts: Facts
    requests: Requests

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
        kv_events: takes the changes of its prefix cache; None: there are no readers.
        engine: figures of its replica that the worker shows; None: none.

    Attributes:
        loss: why its stream is about to end, as text for the worker; empty: it is not.
        outbox: messages to the worker.
        num_tokens: output tokens since it attached.
        busy_ps: time in steps since then.
        late_ps: time since then that it stood idle although it had a plan.
        boundary_ps: the end of its last step.
    """

    def __init__(
        self,
        hello: WorkerHello,
        member: Member,
        cluster: Owner,
        watch: Watch,
        instance_id: str = "",
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
        self._facts = cluster.facts
        self._kv_events = kv_events
        self._engine = engine
        self._inputs = Inputs()
        self._running: RunningPlan | None = None
        self._plan_id = 0  # of the last plan
        self.boundary_ps = 0
        self._plans_ahead = member.replica.options.async_scheduling
        self._next_decision = NextDecision(self._clock, self._decide_guarded)
        self.outbox = Outbox()
        self._given_up = asyncio.Event()
        self._loads: dict[str, list[asyncio.Future[bool]]] = {}  # on request, by adapter key
        self._adapter_log = member.replica.adapters.log = AdapterLog()
        self.num_tokens = self.busy_ps = self.late_ps = self._last_step_ps = 0
        self._told_faults = ToldFaults(self.worker_id, cluster.clock, cluster.faults)
        self._fan_outs = FanOuts(cluster.requests.lives)

    @property
    def replica(self) -> Replica:
        """Its batch and queue; read-only."""
        return self.member.replica

    @property
    def kv_source(self) -> wire_workers.KvEventSource | None:
        """Where it publishes KV events; None: nowhere."""
        return None if self._kv_events is None else self._kv_events.source

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
        self._take(event, at_ps, heeded=event.matters)

    def withdrawn(self, event: Withdrawn, at_ps: int) -> None:
        """Handle a request of this worker that has been cancelled."""
        self._take(event, at_ps)

    def recalled(self, handle: int, to: str, at_ps: int) -> None:
        """Handle a waiting request of this worker that is to move to another."""
        self._take(Recall(handle, to), at_ps)

    def retired(self, adapter_key: str, at_ps: int) -> None:
        """Release an adapter that no further request will name, once no sequence has it."""
        if self.member.retire(adapter_key, at_ps):
            self._take(Retire(adapter_key), at_ps)

    def _take(self, what: Input, at_ps: int, *, heeded: bool = True) -> None:
        """Note and publish an input, and see that it takes effect in time: by a decision, or by an Interrupt.

        Args:
            what: the input.
            at_ps: its time.
            heeded: whether it may change the running plan.
        """
        running = self._running
        expected = heeded or running is None or self._inputs.missed(at_ps)
        taken = self._inputs.take(what, at_ps, expected=expected, lost=bool(self.loss))
        self._facts.publish((taken,), at_ps, self.member)
        if self.loss:
            return
        if running is None:
            self._next_decision.soon(at_ps)
        elif heeded and running.steps_left > 1 and not running.interrupted:
            running.interrupted = True
            self.outbox.send(wire_workers.interrupt(running.plan_id, at_ps))

    def load(self, adapter: Adapter, at_ps: int) -> asyncio.Future[bool] | None:
        """Load an adapter on request; None: this worker loads none.

        Returns:
            Whether the load succeeded; also true if the worker drains or is gone first, and so needs no adapter.
        """
        if self.loss or not self.member.load(adapter, at_ps):
            return None
        over = asyncio.get_running_loop().create_future()
        self._loads.setdefault(adapter.key, []).append(over)
        self._take(LoadOnRequest(adapter), at_ps)
        return over

    def _end_loads(self, adapter_key: str, *, loaded: bool) -> None:
        for over in self._loads.pop(adapter_key, ()):
            if not over.done():
                over.set_result(loaded)

    def _end_all_loads(self) -> None:
        for adapter_key in list(self._loads):
            self._end_loads(adapter_key, loaded=True)

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

    def _decide_guarded(self, at_ps: int) -> None:
        """Decide for the loop; an error ends only this worker's stream."""
        try:
            self._decide(at_ps)
        except Exception as error:
            self.give_up(Loss.ERROR, INTERNAL, error)

    # --- deciding ---------------------------------------------------------------------------------------------------

    def _decide(self, at_ps: int, *, after_step: bool = False) -> None:
        """Plan at this boundary, or as soon as there is something to do; `after_step`: at the end of a step."""
        assert self._running is None, f"plan {self._plan_id} runs"
        at_ps = max(at_ps, self.boundary_ps)
        while True:
            self._next_decision.cancel()
            started = time.thread_time()
            decision = self.member.plan(at_ps)
            decided = Decided(decision, time.thread_time() - started)
            self._tell_of_adapters(at_ps)
            self._facts.publish((*self._inputs.planned(at_ps), decided, *decision.events), at_ps, self.member)
            if isinstance(decision, Idle) or (after_step and self._plans_ahead):
                self._tell_kv_events()
            due_ps = self._begin(decision, at_ps)
            # Only now: a sequence that has left may come back to this worker, and would change the decision just made.
            self._cluster.requests.carry_out(decision.events, self.member)
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
            self._plan_id += 1
            self._running = RunningPlan(decision, self._plan_id)
            now_ps = self._clock.now_ps()
            message = wire_workers.write_plan(
                decision,
                self._plan_id,
                now_ps,
                self._cluster.requests.lives.__getitem__,
                self.hello.needs_prompts,
                None if self._engine is None else self._engine.take(now_ps),
            )
            self.watch.has_plan(self._plan_id, self._cluster.uptime.now())
            self.outbox.send(message)
            return None
        if decision.leaves or decision.adapter_evictions:
            self._plan_id += 1
            self.outbox.send(wire_workers.write_leaves(decision, self._plan_id, at_ps, self._clock.now_ps()))
        if decision.until_ps is not None and decision.until_ps <= self._clock.now_ps():
            return decision.until_ps
        self._next_decision.wait(decision.until_ps)
        return None

    def _tell_of_adapters(self, at_ps: int) -> None:
        """Publish what has happened to its adapters, and end loads on request."""
        for adapter_key, loaded in self.replica.adapters.take_answers():
            self._end_loads(adapter_key, loaded=loaded)
        self._facts.publish(self._adapter_log.take(), at_ps, self.member)

    # --- reports of the worker --------------------------------------------------------------------------------------

    def answer(self, number: int, now_ps: int) -> None:
        """Answer a heartbeat."""
        engine = None if self._engine is None else self._engine.take(now_ps, only_changes=True)
        self.outbox.send(wire_workers.heartbeat_answer(number, now_ps, engine))

    def promised(self, plan_id: int, end_ps: int) -> None:
        """Record when the current step ends by the worker's report."""
        in_seconds = self._clock.to_monotonic(end_ps) - time.monotonic()
        self.watch.promised(plan_id, in_seconds, self._cluster.uptime.now())

    def step_done(self, step: StepReport) -> None:
        """Commit one step, pass its tokens on, and plan again if the worker hands back."""
        running = self._running
        if running is None or step.plan_id != running.plan_id:
            return
        running.check(step, self.boundary_ps, self._clock.now_ps)
        self.watch.progressed(self._cluster.uptime.now())
        if step.ran.end_ps > step.start_ps:
            self._commit(running, step)
        if step.hand_back:
            self._running = None
            self.watch.has_no_plan()
            self.boundary_ps = step.ran.end_ps
            self._decide(step.ran.end_ps, after_step=True)

    def _commit(self, running: RunningPlan, step: StepReport) -> None:
        plan, ran, num_tokens = running.plan, step.ran, len(step.handles_u32) // u32.ITEM_BYTES
        step_ps, gap_ps = ran.end_ps - step.start_ps, step.start_ps - running.expected_start_ps(self.boundary_ps)
        replica = self.member.replica
        fan_out = self._fan_outs.note(step, running, replica.running, replica.ended)
        running.steps_left -= 1
        self.num_tokens += num_tokens
        self.busy_ps += step_ps
        self.late_ps += gap_ps
        self._last_step_ps = step_ps
        self.boundary_ps = ran.end_ps
        self._inputs.stepped(ran.end_ps)
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
        stepped = Stepped(plan, step, num_tokens, gap_ps, time.thread_time() - started, events)
        fan_out.send(step.token_ids_u32, step_ps)
        self._tell_of_adapters(ran.end_ps)
        self._facts.publish((stepped, *events), ran.end_ps, self.member)
        if events:
            self._cluster.requests.carry_out(events, self.member)

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
        latest_ps = max(self.boundary_ps, self._clock.now_ps()) + MAX_AHEAD_PS
        taken = self._told_faults.taken(from_ps, self.boundary_ps, latest_ps)
        self._facts.publish((taken,), from_ps, self.member)

    # --- being gone -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop deciding; the worker is gone."""
        self._next_decision.cancel()
        if self._running is None and not self.loss:
            self._inputs.undecided()
        self._running = None
        self._end_all_loads()

    def lost(self, gave_back: GaveBack, at_ps: int) -> None:
        """Handle what the core has taken back from a worker that is gone."""
        self._tell_of_adapters(at_ps)
        self._gave_back(gave_back, self._inputs.lost(), at_ps)

    def settle(self) -> None:
        """Let what has come to an idle worker take effect before something else happens to it."""
        self._next_decision.settle()

    def drained(self, gave_back: GaveBack, at_ps: int) -> None:
        """Handle what the core has taken back while the rest runs on."""
        self._end_all_loads()
        gone = {event.sequence.handle for event in gave_back.events if isinstance(event, Cancelled | Failed | Finished)}
        gone.update(sequence.handle for sequence in gave_back.sequences)
        self._gave_back(gave_back, self._inputs.left(gone), at_ps)

    def _gave_back(self, gave_back: GaveBack, never: list[InputLate], at_ps: int) -> None:
        self._facts.publish((*never, gave_back, *gave_back.events), at_ps, self.member)
        self._cluster.requests.carry_out(gave_back.events, self.member)

    @property
    def steps_are_settled(self) -> bool:
        """Whether no input should have prevented some of the steps so far.

        A reader of a journal that ended there would not know that the input is late.
        """
        return not self._inputs.any_overdue
