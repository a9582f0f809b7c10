"""Checks a policy as `lorrery validate policy` does: interface, any order of events, and jumps against steps.

A policy must decide the same when queried only as often as it requires, and before every step. Skipping steps makes a
simulation fast and lets a worker run on without its scheduler; it is correct only if the policy would have made no
other decision meanwhile.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from lorrery.scheduler.core.checked.base import SequenceError
from lorrery.scheduler.core.facts import Cancelled, Dropped, Event, Finished
from lorrery.scheduler.core.placements.table import Placement
from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.core.queues.base import is_asked_every_step
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.messages import WorkerHello
from lorrery.scheduler.plugins import in_words
from lorrery.scheduler.replicas import ReplicaFactory
from lorrery.service.settings.cluster import Settings
from lorrery.validation.policy.cases import Case, Cases
from lorrery.validation.policy.contract import PolicyFault, Watched, seconds, watch
from lorrery.validation.policy.drive import Device, Entry, Log, NeverReturnedError, jump, step_by_step, until_stuck

MAX_STEPS = 20_000
"""More than any case needs for all its requests in sequence."""


class Machine:
    """One case, played in a drawn order of arrivals, cancels, steps and losses of its worker.

    The device and the requests are those of the case. After every decision each request must be in exactly one place:
    waiting in the queue, in the batch, or ended.

    Args:
        case: the replica and the requests.
        cases: builds the replica, again when its worker is lost.
        order: number of the drawn order.
    """

    def __init__(self, case: Case, cases: Cases, order: int = 0) -> None:
        self._case, self._cases = case, cases
        world = case.world.anew()
        self._sequences = world.sequences
        self._coming = list(self._sequences)
        self._lengths = {sequence.handle: length for _, sequence, length in world.arrivals}
        self._alive: dict[int, Sequence] = {}
        self._cancelled: set[int] = set()
        self._rng = np.random.default_rng([cases.seed, case.number, 1 + order])
        self._at_ps = 0
        self._start()

    def _start(self) -> None:
        self._replica = self._cases.make_replica(self._case.settings)
        self._queue = self._replica.queue
        watch(self._replica, self._sequences)
        self._device = Device(self._lengths, self._case.world.step_ps, self._case.world.token_ps)
        self._plan: Plan | None = None
        self._steps_left = 0
        self._until_ps: int | None = None

    def play(self) -> None:
        """Play the case to the end of every request.

        Raises:
            PolicyFault: an invariant is violated.
        """
        for _ in range(12 * len(self._coming)):
            draw = self._rng.random()
            if draw < 0.4 and self._coming:
                self._submit(self._coming.pop(0))
            elif draw < 0.48 and self._alive:
                self._cancel(int(self._rng.choice(sorted(self._alive))))
            elif draw < 0.54:
                self._lose_the_worker()
            else:
                self._run(int(self._rng.integers(1, 7)))
        while self._coming:
            self._submit(self._coming.pop(0))
        for _ in range(MAX_STEPS):
            if not self._alive:
                return
            self._run(6)
        raise PolicyFault(f"{_names(self._alive)} never ended, though steps went on")

    def _submit(self, sequence: Sequence) -> None:
        sequence.arrived_ps = self._at_ps
        if self._replica.never_fits_reason(sequence) is None:
            self._alive[sequence.handle] = sequence
            self._replica.submit(sequence, self._at_ps)

    def _cancel(self, handle: int) -> None:
        self._cancelled.add(handle)
        self._replica.cancel(handle, self._at_ps)

    def _run(self, num_steps: int) -> None:
        if self._plan is None:
            self._decide()
        if self._plan is None:
            if self._until_ps is None and not self._coming and self._alive:
                raise PolicyFault(
                    f"at {seconds(self._at_ps)} {_names(self._alive)} would wait for ever: nothing runs, `admit` lets"
                    " nobody in, and `wakes_at_ps` names no time to ask again"
                )
            self._at_ps = max(self._at_ps + self._device.step_ps, self._until_ps or 0)
            return
        first = self._steps_left == self._plan.max_steps
        at_ps = self._at_ps if first else self._at_ps - self._plan.wait_ps  # the wait belongs to the first step
        most = min(num_steps, self._steps_left)
        ran = self._device.run(self._plan, at_ps, most, self._plan.until_ps, chunks=first)
        self._at_ps = ran.end_ps
        self._steps_left -= ran.num_steps
        over = bool(ran.finished) or not self._steps_left or ran.end_ps >= (self._plan.until_ps or ran.end_ps + 1)
        self._note(self._replica.commit(self._plan, ran))
        if over:
            self._plan = None

    def _decide(self) -> None:
        decision = self._replica.plan(self._at_ps)
        self._note(decision.events)
        self._device.forget(decision.leaves)
        if isinstance(decision, Plan):
            self._plan, self._steps_left = decision, decision.max_steps
        else:
            self._until_ps = decision.until_ps
        if not self._case.settings.strict:
            self._check()

    def _check(self) -> None:
        """Check where every request is."""
        when, running = f"at {seconds(self._at_ps)}", self._replica.running
        listed = [sequence.handle for sequence in self._queue]
        if len(set(listed)) < len(listed):
            raise PolicyFault(f"{when} iterating the queue gives a request twice: {listed}")
        if len(self._queue) != len(listed):
            raise PolicyFault(f"{when} len() of the queue is {len(self._queue)}, and iterating gives {len(listed)}")
        for handle in listed:
            if running.get(handle) is not None:
                raise PolicyFault(
                    f"{when} request {handle} was admitted and still waits; `admit` must take out of the queue whom the"
                    " pass has admitted"
                )
            if handle not in self._alive:
                raise PolicyFault(f"{when} request {handle} was cancelled or dropped, and still waits")
        for handle in self._alive:
            if handle in self._cancelled:
                raise PolicyFault(f"{when} request {handle} was cancelled, and `cancel({handle})` did not return it")
            if handle not in listed and running.get(handle) is None:
                raise PolicyFault(
                    f"{when} request {handle} is lost: it was given to `append`, and neither waits nor was admitted"
                )
        if listed and self._queue.at_rest():
            raise PolicyFault(f"{when} `at_rest` says that there is nobody to try, and {_names(listed)} would wait")

    def _lose_the_worker(self) -> None:
        unfinished, events = self._replica.lose(self._at_ps)
        self._note(events)
        if missing := set(self._alive) - {sequence.handle for sequence in unfinished}:
            raise PolicyFault(
                f"at {seconds(self._at_ps)} the worker was lost, and {_names(missing)} did not come back; `clear` must"
                " return all that wait"
            )
        self._start()
        for sequence in unfinished:
            self._replica.submit(sequence, self._at_ps)

    def _note(self, events: Iterable[Event]) -> None:
        for event in events:
            if not isinstance(event, Finished | Cancelled | Dropped):
                continue
            handle = event.sequence.handle
            if self._alive.pop(handle, None) is None:
                raise PolicyFault(f"at {seconds(self._at_ps)} request {handle} ended a second time")


def _names(handles: object) -> str:
    assert isinstance(handles, dict | list | set)
    names = [str(handle) for handle in sorted(handles)]
    return f"request{'s' * (len(names) > 1)} {', '.join(names)}"


_VERBS = {
    "admitted": "let request {} in",
    "first": "gave request {} its first token",
    "finished": "ended request {}",
    "cancelled": "cancelled request {}",
    "dropped": "dropped request {}",
    "preempted": "preempted request {}",
}


def check_jumps(case: Case, cases: Cases) -> None:
    """Run a case both ways.

    Raises:
        PolicyFault: the runs diverge; says where, and what the queue had answered before.
    """
    one, other = cases.make_replica(case.settings), cases.make_replica(case.settings)
    world, again = case.world.anew(), case.world.anew()
    watch(one, world.sequences)
    stepped = step_by_step(one, world)
    watched = watch(other, again.sequences)
    jumped = jump(other, again)
    if stepped == jumped:
        return
    at = next(
        (index for index, (a, b) in enumerate(zip(stepped, jumped, strict=False)) if a != b),
        min(len(stepped), len(jumped)),
    )
    raise PolicyFault(_tell(stepped, jumped, at, case, watched, is_asked_every_step(other.queue)))


def _tell(stepped: Log, jumped: Log, at: int, case: Case, watched: Watched, every_step: bool) -> str:
    asked, unasked = stepped[at : at + 1], jumped[at : at + 1]
    at_ps = min(entry[1] for entry in (*asked, *unasked))
    lines = [
        f"asked before every step the queue {_what(asked)}; asked only when it said, it {_what(unasked)}",
    ]
    if every_step:
        lines.append("made twice alike it decides differently: does it draw at random, or keep state in its class?")
        return "\n".join(lines)
    said = watched.last("holds_for", at_ps + 1)
    if said is not None:
        lines.append(
            f"`holds_for` had promised at {seconds(said.at_ps)} that nothing would change for {said.value} steps"
        )
    since_ps = said.at_ps if said is not None else 0
    promised = watched.last("arrivals_matter", at_ps + 1)
    arrived = [s.handle for when, s, _ in case.world.arrivals if since_ps <= when <= at_ps]
    if promised is not None and not promised.value and arrived:
        lines.append(
            f"`arrivals_matter` had promised at {seconds(promised.at_ps)} that an arrival changes nothing; request"
            f" {arrived[-1]} arrived at {seconds(case.world.arrivals[arrived[-1]][0])}"
        )
    elif (wakes := watched.last("wakes_at_ps", at_ps + 1)) is not None and wakes.value is None:
        lines.append("`wakes_at_ps` had said that time alone changes nothing")
    if len(lines) == 1:
        lines.append("`decoded` is told of several steps at once: does it count them all?")
    return "\n".join(lines)


def _what(entries: list[Entry]) -> str:
    if not entries:
        return "did nothing more"
    kind, at_ps, who = entries[0][:3]
    return f"{_VERBS.get(str(kind), f'{kind} {{}}').format(who)} at {seconds(at_ps)}"


_POOL_TOKENS = 1_000
NUM_ORDERS = 3
"""Orders in which each case is played, before it is run by steps and by jumps."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a check.

    Attributes:
        num_cases: that were run, each in drawn order and by steps against jumps.
        every_step: whether the policy must be queried before every step.
        case: the case that failed; None: all passed.
        fault: description of the failure, in lines.
    """

    num_cases: int
    every_step: bool
    case: Case | None = None
    fault: str = ""


def check_policy(
    settings: Settings, *, seed: int, seconds: float, watch: Callable[[int], None] = lambda number: None
) -> Verdict:
    """Try a policy until a fault is found or the time is up.

    Args:
        settings: name the policy, its options and its environment.
        seed: of all draws.
        seconds: wall-clock limit; at least one case is run.
        watch: called with each case's number before it runs.

    Raises:
        SettingsError: no such policy, or not a policy.
    """
    factory = ReplicaFactory(settings)
    hello = WorkerHello(
        "worker-0", settings.worker.gpu, settings.model, 1, _POOL_TOKENS, "roofline", needs_prompts=False
    )
    base = replace(factory.replica_settings(hello), prefix_cache="none")

    def make_replica(chosen: ReplicaSettings) -> Replica:
        return factory.replica(chosen)

    cases = Cases(seed, base, dict(settings.scheduler), make_replica)
    every_step = is_asked_every_step(factory.replica(base).queue)
    end = time.monotonic() + seconds
    number = 0
    while not number or time.monotonic() < end:
        watch(number)
        case = cases.draw(number)
        number += 1
        fault = _fault_in(case, cases)
        if fault is not None:
            return Verdict(number, every_step, case, fault)
    return Verdict(number, every_step)


def placements_of(settings: Settings) -> Callable[[np.random.Generator], Placement]:
    """Return the constructor of the placement in these settings, which takes a generator.

    Raises:
        SettingsError: no such placement, or not a placement.
    """
    factory = ReplicaFactory(settings)
    factory.placement()  # raises now if the class is not a placement
    return factory.placement


def _fault_in(case: Case, cases: Cases) -> str | None:
    def play() -> None:
        for order in range(NUM_ORDERS):
            Machine(case, cases, order).play()
        check_jumps(case, cases)

    try:
        until_stuck(play)
    except (PolicyFault, NeverReturnedError) as fault:
        return str(fault)
    except SequenceError as error:
        return f"raised {in_words(error.error)}"
    except KeyboardInterrupt:  # of a person, where this is called from Python
        raise
    except BaseException as error:  # raised by the policy, or by the core that cannot go on after it
        return f"raised {in_words(error)}"
    return None
