"""Records a queue's answers, so that a fault can be described in its author's terms."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import UnionType
from typing import Any, NamedTuple

from lorrery.scheduler.core.checked.base import original
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Sequence
from lorrery.validation.policy.fault import PolicyFault, seconds
from lorrery.validation.policy.unchanged import Unchanged

_OF_QUEUE = (
    "append", "cancel", "clear", "admit", "holds_for", "wakes_at_ps", "at_rest", "arrivals_matter", "look_ahead",
    "decoded",
)  # fmt: skip
_OF_BATCHING = ("choose", "advanced", "emptied", "arrivals_matter")


class Answer(NamedTuple):
    """One answer of the queue: method, time, limit, value."""

    method: str
    at_ps: int
    limit: int
    value: Any


@dataclass
class Watched:
    """The answers that a queue has given.

    Attributes:
        answers: of `holds_for`, `arrivals_matter` and `wakes_at_ps`, in order.
        at_ps: time of the last call that had one.
    """

    answers: list[Answer]
    at_ps: int = 0

    def last(self, method: str, before_ps: int) -> Answer | None:
        """Return the last answer of a method before a time."""
        return next((a for a in reversed(self.answers) if a.method == method and a.at_ps < before_ps), None)


_TYPES: dict[str, tuple[type | UnionType, str]] = {
    "clear": (list, "a list"),
    "look_ahead": (list, "a list"),
    "cancel": (Sequence | None, "the request as a Sequence, or None"),
    "at_rest": (bool, "True or False"),
    "arrivals_matter": (bool, "True or False"),
}
"""Types of answers that the core accepts; interpreted, it would tolerate more than compiled, as in a wheel."""


def watch(replica: Replica, sequences: Iterable[Sequence]) -> Watched:
    """Record every answer of a replica's queue; refuse invalid ones, and changes of these sequences.

    The methods of queue and way to batch are wrapped in the instances; their classes are not changed. A class whose
    instances take no attributes (with `__slots__`, or compiled) is checked all the same, with less detail in messages,
    and its changes as at run time only.
    """
    watched = Watched([])
    queue: Any = original(replica.queue)
    batching = original(replica.batching)
    unchanged = Unchanged(sequences, lambda: watched.at_ps)
    for policy, methods in ((queue, _OF_QUEUE), (batching, _OF_BATCHING)):
        with suppress(AttributeError):
            unchanged.guard(policy, methods)
    admit, holds_for, wakes_at_ps = queue.admit, queue.holds_for, queue.wakes_at_ps
    arrivals_matter: Callable[[], bool]

    def admit_noted(admission: Any, running: Any, at_ps: int) -> Any:  # noqa: ANN401  passed on
        watched.at_ps = at_ps
        answer = admit(admission, running, at_ps)
        if not isinstance(answer, list):
            raise PolicyFault(
                f"at {seconds(at_ps)} `admit` answered {answer!r}; it must be a list of requests that it dropped, []"
                " for none"
            )
        return answer

    def holds_noted(running: Any, memory: Any, limit: int) -> int:  # noqa: ANN401  passed on
        answer: int = holds_for(running, memory, limit)
        if not isinstance(answer, int) or not 1 <= answer <= limit:
            raise PolicyFault(
                f"at {seconds(watched.at_ps)} `holds_for` answered {answer!r}; it must be a whole number from 1 to"
                f" limit, here {limit}"
            )
        watched.answers.append(Answer("holds_for", watched.at_ps, limit, answer))
        return answer

    def wakes_noted(at_ps: int) -> int | None:
        answer: int | None = wakes_at_ps(at_ps)
        if answer is not None and (not isinstance(answer, int) or answer <= at_ps):
            raise PolicyFault(
                f"at {seconds(at_ps)} `wakes_at_ps` answered {answer!r}; it must be None, or a later time in whole"
                f" picoseconds ({at_ps} is now)"
            )
        watched.answers.append(Answer("wakes_at_ps", at_ps, 0, answer))
        return answer

    def heeds_noted() -> bool:
        answer = arrivals_matter()
        watched.answers.append(Answer("arrivals_matter", watched.at_ps, 0, answer))
        return answer

    def typed(method: str) -> Callable[..., Any]:
        inner = getattr(queue, method)
        wanted, words = _TYPES[method]

        def ask(*arguments: Any) -> Any:  # noqa: ANN401  passed on
            answer = inner(*arguments)
            if not isinstance(answer, wanted):
                raise PolicyFault(f"at {seconds(watched.at_ps)} `{method}` answered {answer!r}; it must be {words}")
            return answer

        return ask

    with suppress(AttributeError):
        queue.admit, queue.holds_for = admit_noted, holds_noted
        queue.wakes_at_ps = wakes_noted
        for method in _TYPES:
            setattr(queue, method, typed(method))
        arrivals_matter = queue.arrivals_matter
        queue.arrivals_matter = heeds_noted
    return watched
