"""Results of a worker's decisions and steps for its requests: ends, sent to their routers, and counts."""

from collections.abc import Collection, Iterable
from typing import Protocol

from lorrery.scheduler import wire_routers
from lorrery.scheduler.core import refusals
from lorrery.scheduler.core.history import History
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.plan import (
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
from lorrery.scheduler.core.refusals import Refusal
from lorrery.scheduler.live_request import Counted, LiveRequest
from lorrery.scheduler.metrics import SchedulerMetrics
from lorrery.vocabulary.units import PS_PER_SECOND

_OUTCOMES = {Dropped: "dropped", Failed: "failed", Cancelled: "cancelled"}


class RequestOwner(Protocol):
    """The requests of a scheduler, as far as workers end them."""

    metrics: SchedulerMetrics
    lives: dict[int, LiveRequest]

    @property
    def history(self) -> History | None:
        """The history, while there is a watcher."""
        ...

    def forget(self, live: LiveRequest) -> None:
        """Drop a request that has ended."""
        ...

    def finished(self, live: LiveRequest, event: Finished) -> None:
        """Count and drop a request that has finished."""
        ...

    def cancelled(self, lives: Collection[LiveRequest]) -> None:
        """Count and drop cancelled requests; a router that leaves may have thousands."""
        ...

    def take_recalled(self, recalled: Iterable[Recalled], donor: Member) -> None:
        """Give recalled sequences that have left their worker to another."""
        ...

    def log_error(self, message: str, error: Exception) -> None:
        """Log a policy's exception, each message once."""
        ...


class Outcomes:
    """Carries out the events of one worker.

    Args:
        member: the worker in the core.
        requests: of the scheduler.
    """

    def __init__(self, member: Member, requests: RequestOwner) -> None:
        self._member = member
        self._requests = requests
        self._metrics = requests.metrics
        self._num_evictions = 0

    def carry_out(self, events: Collection[Event], at_ps: int) -> None:
        """Report ends to routers, count, and drop ended requests.

        Args:
            events: of a decision or of steps.
            at_ps: the boundary of the decision, or the end of the steps.
        """
        lives = self._requests.lives
        if (history := self._requests.history) is not None:
            self._note(history, events, at_ps)
        cache = self._member.replica.prefix_cache
        if cache is not None:
            self._metrics.prefix_evictions.inc(cache.num_evictions - self._num_evictions)
            self._num_evictions = cache.num_evictions
        if not events:
            return
        cancelled: list[LiveRequest] = []
        recalled: list[Recalled] = []
        for event in events:
            if isinstance(event, Admitted):
                sequence = event.sequence
                live = lives.get(sequence.handle)
                new = live is None or live.counted < Counted.ADMISSION
                if event.first and new and sequence.first_admitted_ps is not None:
                    self._metrics.admitted(sequence, sequence.first_admitted_ps - sequence.arrived_ps)
                    if live is not None and live.trace is not None:
                        seconds = (sequence.first_admitted_ps - sequence.arrived_ps) / PS_PER_SECOND
                        self._metrics.queue_seconds.exemplify(seconds, live.trace.trace_id)
                if live is not None and live.trace is not None:
                    live.trace.admitted(at_ps, has_cache=cache is not None)
                if event.queried_tokens and new:
                    self._metrics.prefix_looked_up(event.queried_tokens, sequence.cached_tokens)
            elif isinstance(event, FirstToken):
                live = lives[event.sequence.handle]
                if live.counted < Counted.FIRST_TOKEN and not live.orphaned:
                    self._metrics.first_token(event.at_ps - event.sequence.arrived_ps)
                if live.trace is not None:
                    live.trace.first_token(event.at_ps)
            elif isinstance(event, Finished):
                live = lives[event.sequence.handle]
                if event.sequence.withdrawal is None:  # the router of a cancelled one was told at once
                    live.router.finished(
                        wire_routers.finished(
                            live.router_handle,
                            event.sequence,
                            event.reason,
                            event.output_tokens,
                            self._member.name,
                            event.at_ps,
                        )
                    )
                self._requests.finished(live, event)
            elif isinstance(event, Dropped):
                self._refuse(lives[event.sequence.handle], "dropped", refusals.dropped(event))
            elif isinstance(event, Raised):
                self._requests.log_error(event.message, event.error)
            elif isinstance(event, Failed):
                self._refuse(lives[event.sequence.handle], "failed", refusals.raised(event.message))
            elif isinstance(event, Recalled):
                recalled.append(event)
            elif isinstance(event, Preempted):
                self._metrics.preemptions.inc()
                live = lives[event.sequence.handle]
                if len(live.token_ids) > event.sequence.produced_tokens:  # `core.overlap`
                    live.num_repeats += len(live.token_ids) - event.sequence.produced_tokens
                    del live.token_ids[event.sequence.produced_tokens :]
                if live.trace is not None:
                    live.trace.preempted(at_ps)
            elif isinstance(event, Cancelled):
                cancelled.append(lives[event.sequence.handle])
        if cancelled:
            self._requests.cancelled(cancelled)
        if recalled:
            self._requests.take_recalled(recalled, self._member)

    def _note(self, history: History, events: Collection[Event], at_ps: int) -> None:
        """Record the events in the history."""
        history.decided(self._member, events, at_ps)
        lives, worker_id = self._requests.lives, self._member.name
        for event in events:
            if isinstance(event, Finished):
                history.ended(event.sequence, worker_id, event.reason.word, event.output_tokens, event.at_ps)
            elif isinstance(event, Dropped | Failed | Cancelled):
                live = lives[event.sequence.handle]
                outcome = _OUTCOMES[type(event)] if not live.refused else "dropped"
                history.ended(event.sequence, worker_id, outcome, len(live.token_ids), at_ps)

    def _refuse(self, live: LiveRequest, outcome: str, refusal: Refusal) -> None:
        self._metrics.requests.labels(outcome).inc()
        if live.trace is not None:
            live.trace.refused(refusal)
        live.router.refused(live.router_handle, refusals.withheld(refusal))
        self._requests.forget(live)
