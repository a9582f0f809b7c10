"""A callable that does not hold a reference to its target.

A placement reads figures of candidates, which ask the simulation to update them. The candidate must not lead a policy
to the simulation, which holds the true lengths; it also avoids a reference cycle. Not compiled: objects of compiled
classes cannot be weakly referenced.
"""

from collections.abc import Callable
from typing import Generic, ParamSpec
from weakref import ref

P = ParamSpec("P")


class Answers(Generic[P]):
    """Holds the target of weak calls; they work while this object is alive.

    Args:
        answer: called for each call of `weakly`.
    """

    __slots__ = ("__weakref__", "answer")

    def __init__(self, answer: Callable[P, None]) -> None:
        self.answer = answer


def weakly(answers: Answers[P]) -> Callable[P, None]:
    """Return a callable that calls `answers.answer` while `answers` is alive, and does nothing afterwards."""
    kept = ref(answers)

    def call(*arguments: P.args, **named: P.kwargs) -> None:
        if (still := kept()) is not None:
            still.answer(*arguments, **named)

    return call
