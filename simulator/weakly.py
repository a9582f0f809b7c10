"""A call that does not lead to who answers it.

A placement reads figures of candidates, which ask the simulation to bring them up to date. What it reads from must not
lead it to the simulation, where the true lengths are; nor is a cycle of references needed to be asked. Not compiled:
objects of compiled classes cannot be referred to weakly.
"""

from collections.abc import Callable
from typing import Generic, ParamSpec
from weakref import ref

P = ParamSpec("P")


class Answers(Generic[P]):
    """Whoever keeps this answers.

    Args:
        answer: called for each call of `weakly`.
    """

    __slots__ = ("__weakref__", "answer")

    def __init__(self, answer: Callable[P, None]) -> None:
        self.answer = answer


def weakly(answers: Answers[P]) -> Callable[P, None]:
    """Return a call that is answered for as long as somebody keeps `answers`, and is without effect afterwards."""
    kept = ref(answers)

    def call(*arguments: P.args, **named: P.kwargs) -> None:
        if (still := kept()) is not None:
            still.answer(*arguments, **named)

    return call
