"""Combines several observers of a simulation into one."""

from collections.abc import Sequence

from lorrery.simulator.request import SimulatedRequest
from lorrery.simulator.step_span import Observer, StepSpan


def as_one(observers: Sequence[Observer]) -> Observer | None:
    """Return one observer that forwards to all of these in order; None: there are none."""
    if len(observers) > 1:
        return _Observers(observers)
    return observers[0] if observers else None


class _Observers:
    """Forwards to several observers."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def begin(self, start_ps: int) -> None:
        for observer in self._observers:
            observer.begin(start_ps)

    def ran(self, span: StepSpan) -> None:
        for observer in self._observers:
            observer.ran(span)

    def left(self, worker: str, handle: int) -> None:
        for observer in self._observers:
            observer.left(worker, handle)

    def requeued(self, worker: str, request: SimulatedRequest) -> None:
        for observer in self._observers:
            observer.requeued(worker, request)

    def lost(self, worker: str) -> None:
        for observer in self._observers:
            observer.lost(worker)
