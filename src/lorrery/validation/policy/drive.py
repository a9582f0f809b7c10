"""Drives a replica under a virtual clock with a device of simple integer step times.

Two drivers share it: `step_by_step` plans before every step (the oracle), `jump` runs each plan for its full length.

A call of a policy that does not return is ended (`until_stuck`). A timer ticks each second. Its signal's handler reads
the stack, in which the policy's call is the outermost frame that is not of this tree. If that is the same call for
`MOST_TICKS` ticks, the handler raises in it. So calls cost nothing, and any method counts.

A call in C (`sum(itertools.count())`) runs no handler, and one that catches `BaseException` in its loop goes on: such a
process is ended from outside. In another than the main thread nothing is watched, since Python runs handlers there.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from lorrery.scheduler.core.facts import (
    AdaptersKept,
    Admitted,
    Cancelled,
    Dropped,
    Event,
    Failed,
    Finished,
    FirstToken,
    Preempted,
    Raised,
    Recalled,
)
from lorrery.scheduler.core.plan import Idle, Plan, Ran
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Sequence, Withdrawal
from lorrery.validation.policy.contract import PolicyFault, seconds
from lorrery.vocabulary.endings import CancelCause, FinishReason

STEP_PS = 1_000
TOKEN_PS = 7
MAX_DECISIONS = 200_000
"""More than any terminating case needs."""


@dataclass
class World:
    """External events, and the speed of the device.

    Attributes:
        arrivals: (time, sequence, its hidden true length), in order of time.
        cancels: (time, handle).
        step_ps: of a step, without its tokens.
        token_ps: of each token that a step computes or finds in the cache.
        cut: handles of those that are cancelled because a stop string shows in their second token.
    """

    arrivals: list[tuple[int, Sequence, int]]
    cancels: list[tuple[int, int]] = field(default_factory=list)
    step_ps: int = STEP_PS
    token_ps: int = TOKEN_PS
    cut: frozenset[int] = frozenset()

    @property
    def sequences(self) -> list[Sequence]:
        """Its sequences, in order of arrival."""
        return [sequence for _, sequence, _ in self.arrivals]

    def anew(self) -> "World":
        """Return a copy with fresh sequences; those here must not have run."""
        arrivals = []
        for at_ps, old, length in self.arrivals:
            sequence = Sequence(
                old.handle,
                old.prompt_tokens,
                old.max_new_tokens,
                old.arrived_ps,
                old.adapter,
                old.tenant_id,
                old.prompt_token_ids,
                old.output_token_ids,
                old.produced_tokens,
            )
            sequence.priority = old.priority
            sequence.skips_prefix_cache = old.skips_prefix_cache
            arrivals.append((at_ps, sequence, length))
        return replace(self, arrivals=arrivals)


@dataclass
class Device:
    """Ends a sequence at its hidden length; a step takes `step_ps`, and `token_ps` per token computed or cached."""

    true_lengths: dict[int, int]
    step_ps: int = STEP_PS
    token_ps: int = TOKEN_PS
    produced: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    present: set[int] = field(default_factory=set)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Remove sequences that left the batch."""
        for sequence in sequences:
            self.present.discard(sequence.handle)
            self.produced.pop(sequence.handle, None)
            self.cached.pop(sequence.handle, None)
            self.ended.discard(sequence.handle)

    def run(self, plan: Plan, at_ps: int, max_steps: int, until_ps: int | None, *, chunks: bool = True) -> Ran:
        """Run steps until the first sequence ends, `max_steps` or `until_ps`."""
        self.present |= {sequence.handle for sequence in plan.joins}
        assert self.present >= {chunk.handle for chunk in plan.prefills}, "a prompt of a sequence that has not joined"
        end_ps, steps = at_ps + plan.wait_ps, 0
        while True:
            work = plan.prefills if chunks and steps < plan.chunk_steps else []
            end_ps += self.step_ps + self.token_ps * sum(chunk.new_tokens for chunk in work)
            stepping = list(self.produced) if plan.decode else []
            end_ps += self.token_ps * sum(self.cached[handle] for handle in stepping)
            stepping = [handle for handle in stepping if handle not in self.ended]
            for handle in stepping:
                self.produced[handle] += 1
                self.cached[handle] += 1
            for chunk in work:
                if chunk.samples:
                    self.produced[chunk.sequence.handle] = chunk.sequence.produced_tokens + 1
                    self.cached[chunk.sequence.handle] = chunk.sequence.input_tokens
                    stepping.append(chunk.sequence.handle)
            steps += 1
            ended = self._ended(stepping, hold=plan.hold)
            if ended or steps == max_steps or (until_ps is not None and end_ps >= until_ps):
                return Ran(steps, end_ps, ended)

    def _ended(self, handles: list[int], *, hold: bool) -> list[tuple[int, FinishReason]]:
        ended = [h for h in handles if h not in self.ended and self.produced[h] >= self.true_lengths[h]]
        for handle in ended:
            if hold:
                self.ended.add(handle)
            else:
                del self.produced[handle], self.cached[handle]
                self.present.discard(handle)
        return [(handle, FinishReason.EOS) for handle in ended]


Entry = tuple[Any, ...]
Log = list[Entry]


def note(event: Event, at_ps: int) -> Entry:
    """Return an event as a log entry: kind, time, handle, and more."""
    match event:
        case Admitted(sequence):
            return ("admitted", at_ps, sequence.handle, sequence.cached_tokens)
        case Recalled(sequence):
            return ("recalled", at_ps, sequence.handle)
        case Cancelled(sequence):
            return ("cancelled", at_ps, sequence.handle)
        case Dropped(sequence):
            return ("dropped", at_ps, sequence.handle)
        case Preempted(sequence):
            return ("preempted", at_ps, sequence.handle)
        case Failed(sequence):
            return ("failed", at_ps, sequence.handle)
        case Raised(message):
            return ("raised", at_ps, message)
        case FirstToken(sequence, first_ps):
            return ("first", first_ps, sequence.handle)
        case Finished(sequence, reason, output_tokens, end_ps):
            return ("finished", end_ps, sequence.handle, reason.word, output_tokens)
        case AdaptersKept(adapter_keys):
            return ("kept", at_ps, adapter_keys)


Check = Callable[[Replica], None]


def step_by_step(replica: Replica, world: World, check: Check = lambda replica: None) -> Log:
    """Plan before every step; return the events. `check` is called after every plan and every step."""
    return _drive(replica, world, jump_steps=False, check=check)


def jump(replica: Replica, world: World, check: Check = lambda replica: None) -> Log:
    """Run each plan for its full length; return the events."""
    return _drive(replica, world, jump_steps=True, check=check)


def _drive(replica: Replica, world: World, *, jump_steps: bool, check: Check) -> Log:
    coming: list[tuple[int, int, Sequence | int]] = [(at, 0, sequence) for at, sequence, _ in world.arrivals]
    coming += [(at, 1, handle) for at, handle in world.cancels]
    coming.sort(key=lambda event: event[:2])
    lengths = {sequence.handle: length for _, sequence, length in world.arrivals}
    sequences = {sequence.handle: sequence for sequence in world.sequences}
    device = Device(lengths, world.step_ps, world.token_ps)
    log: Log = []
    at_ps = 0

    def hand_in(until_ps: int) -> None:
        while coming and coming[0][0] <= until_ps:
            at, _, what = coming.pop(0)
            if isinstance(what, Sequence):
                replica.submit(what, at)
            else:
                cause = CancelCause.STOP_TEXT if what in world.cut else CancelCause.CLIENT_LEFT
                sequences[what].withdrawal = Withdrawal(cause, at, 2)
                replica.cancel(what, at)

    for _ in range(MAX_DECISIONS):
        hand_in(at_ps)
        decision = replica.plan(at_ps)
        log += [note(event, at_ps) for event in decision.events]
        device.forget(decision.leaves)
        check(replica)
        if isinstance(decision, Idle):
            times = [time for time in (decision.until_ps, coming[0][0] if coming else None) if time is not None]
            if not times:
                assert not device.produced
                return log
            at_ps = max(at_ps, min(times))
            continue
        until_ps = decision.until_ps
        bounding = [
            at for at, kind, what in coming if kind == 1 or replica.arrival_matters(getattr(what, "adapter", None))
        ]
        if bounding:
            until_ps = bounding[0] if until_ps is None else min(until_ps, bounding[0])
        most = max(decision.max_steps, decision.chunk_steps) if jump_steps else 1
        ran = device.run(decision, at_ps, most, until_ps)
        at_ps = ran.end_ps
        log += [note(event, at_ps) for event in replica.commit(decision, ran)]
        check(replica)
    over = {entry[2] for entry in log if entry[0] in ("finished", "cancelled", "dropped", "failed")}
    left = ", ".join([str(handle) for handle in lengths if handle not in over])
    raise PolicyFault(
        f"at {seconds(at_ps)}, after {MAX_DECISIONS:,} decisions, there was still something to decide"
        + (f", and of the requests {left} had not ended: `admit` lets them in too late or never" if left else "")
        + "; do `wakes_at_ps` and `Wait` name one time after another, though nothing changes then?"
    )


TICK_SECONDS = 1.0
MOST_TICKS = 10

T = TypeVar("T")


class NeverReturnedError(BaseException):
    """A call of a policy was ended; says which. No `Exception`, so that neither core nor policy goes on after it."""


def until_stuck(run: Callable[[], T]) -> T:
    """Run a case.

    Raises:
        NeverReturnedError: one call of a policy took `MOST_TICKS` ticks.
    """
    if threading.current_thread() is not threading.main_thread():
        return run()
    base = sys._getframe()  # noqa: SLF001  the end of the part of the stack that is looked at
    last: FrameType | None = None
    num_ticks = 0

    def look(_number: int, frame: FrameType | None) -> None:
        nonlocal last, num_ticks
        called = _call_of_policy(frame, base)
        num_ticks = num_ticks + 1 if called is not None and called is last else 0
        last = called
        if called is not None and num_ticks >= MOST_TICKS:
            num_ticks = 0
            code = called.f_code
            raise NeverReturnedError(
                f"`{code.co_name}` did not return within {MOST_TICKS * TICK_SECONDS:g} s, and was in"
                f" {Path(code.co_filename).name}, line {called.f_lineno}; it must return, as the worker waits for it"
            )

    handler = signal.signal(signal.SIGALRM, look)
    timer = signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)
    try:
        return run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        last = None


def _call_of_policy(frame: FrameType | None, base: FrameType) -> FrameType | None:
    found: FrameType | None = None
    while frame is not None and frame is not base:
        if not str(frame.f_globals.get("__name__", "")).startswith("lorrery."):
            found = frame
        frame = frame.f_back
    return found
