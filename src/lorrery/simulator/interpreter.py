"""What a compiled simulation needs from the interpreter: signal handlers, weak references, a quiet garbage collector.

So this module is not compiled, which a test checks. Python runs signal handlers between the instructions of interpreted
code, and a compiled loop has none: Ctrl-C would wait for its end. Objects of compiled classes cannot be weakly
referenced.

A simulation's objects (requests, plans, events) refer to one another in one direction only, and are freed with the last
reference. The collector, which looks for cycles whenever 700 more objects have been made than freed, finds none; with
the compiled core its passes over the open requests took a tenth of a run.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, ParamSpec
from weakref import ref


def run_signal_handlers() -> None:
    """Execute one call of interpreted code."""


P = ParamSpec("P")


class WeakTarget(Generic[P]):
    """Holds a callable for `weak_call`, which works while this object is alive."""

    __slots__ = ("__weakref__", "call")

    def __init__(self, call: Callable[P, None]) -> None:
        self.call = call


def weak_call(target: WeakTarget[P]) -> Callable[P, None]:
    """Return a callable that calls the target while it is alive, and does nothing afterwards.

    A placement reads figures of candidates, which ask the simulation to update them. The candidate must not lead a
    policy to the simulation, which holds the true lengths; it also avoids a reference cycle.
    """
    weak = ref(target)

    def call(*arguments: P.args, **named: P.kwargs) -> None:
        if (alive := weak()) is not None:
            alive.call(*arguments, **named)

    return call


NEW_OBJECTS = 100_000
"""New objects between two passes over the youngest generation: some 20 MB, should they be garbage after all."""


@contextmanager
def garbage_collected_seldom() -> Iterator[None]:
    """Raise this process's collection threshold to `NEW_OBJECTS` for a while. A disabled collector stays disabled."""
    before = gc.get_threshold()
    gc.set_threshold(before[0] and max(before[0], NEW_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
