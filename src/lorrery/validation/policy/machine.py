"""A replica under any order of arrivals, cancels, steps and losses of its worker, with its invariants checked.

The device and the requests are those of a case; the order is drawn. After every decision each request must be in
exactly one place: waiting in the queue, in the batch, or ended.
"""

from collections.abc import Iterable

import numpy as np

from lorrery.scheduler.core.facts import Cancelled, Dropped, Event, Finished
from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.core.sequence import Sequence
from lorrery.validation.policy.cases import Case, Cases
from lorrery.validation.policy.drive import Device
from lorrery.validation.policy.fault import PolicyFault, seconds
from lorrery.validation.policy.watch import watch

MAX_STEPS = 20_000
"""More than any case needs for all its requests in sequence."""


class Machine:
    """One case, played in a drawn order.

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
