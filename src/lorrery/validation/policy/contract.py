"""Watches a queue or a way to batch: what it answers, and what it changes in the requests that it was handed.

A breach of the contract is described in its author's terms. Every field of every request of a case is compared around
each call. Inside of some calls the core changes requests itself, by the pass that a queue tries them in and by
`context.admit`; such changes are told apart by what they must be.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from operator import attrgetter
from types import UnionType
from typing import Any, NamedTuple

from lorrery.scheduler.core.checked.base import original
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.units import PS_PER_SECOND


class PolicyFault(Exception):  # noqa: N818  a fault of the policy, not of ours
    """A policy's violation of its contract, in one line or a few."""


def seconds(at_ps: int) -> str:
    """Format a time for the author."""
    return f"{at_ps / PS_PER_SECOND:.4f} s"


FIELDS = tuple(field.name for field in fields(Sequence))
_values_of = attrgetter(*FIELDS)
_LOAD = ("load_end", "load_wait_ps", "queue_load_ps", "prefill_load_ps")
_READ_BY_AWAIT = (*_LOAD, "first_admitted_ps", "first_token_ps", "produced_tokens")
_BY_CONTEXT = frozenset(
    {
        "admitted_ps",
        "entered",
        "first_admitted_ps",
        "first_cached_tokens",
        "num_overtaken",
        "dropped",
        "aborted",
        *_LOAD,
    }
)
"""Fields that `context.admit` may change, and a queue's pass or drop within it, which are compared by themselves."""

_BY_PREEMPTION = frozenset(
    {"produced_tokens", "input_tokens", "budget_tokens", "num_requeues", "cached_tokens", "computed_tokens"}
)
"""Fields that `context.preempt` may change, too."""

Values = dict[str, Any]
Allowed = Callable[[Sequence, Values, tuple[Any, ...]], Collection[str]]
"""Fields of a request that may differ after a call, given their values before it, and its arguments."""


class Unchanged:
    """The requests of a case, which the policies that are guarded must not change.

    Args:
        sequences: all of them.
        now_ps: returns the time, for messages.
    """

    def __init__(self, sequences: Iterable[Sequence], now_ps: Callable[[], int]) -> None:
        self._sequences = list(sequences)
        self._now_ps = now_ps

    def guard(self, policy: object, methods: Iterable[str]) -> None:
        """Wrap methods of a policy in its instance, so that a change is undone and raised as a `PolicyFault`.

        Raises:
            AttributeError: its instances take no attributes.
        """
        for method in methods:
            setattr(policy, method, self._guarded(method, getattr(policy, method)))

    def _guarded(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:  # noqa: ANN401  passed on
            before = [_values_of(sequence) for sequence in self._sequences]
            try:
                answer = inner(*arguments)
            except PolicyFault:
                raise
            except Exception as error:
                self._check(method, before, arguments, error)  # a change most likely caused it
                raise
            self._check(method, before, arguments, None)
            return answer

        return call

    def _check(
        self, method: str, before: list[tuple[Any, ...]], arguments: tuple[Any, ...], error: Exception | None
    ) -> None:
        for sequence, old in zip(self._sequences, before, strict=True):
            if _values_of(sequence) == old:
                continue
            was = dict(zip(FIELDS, old, strict=True))
            allowed = _ALLOWED.get(method, _none)(sequence, was, arguments)
            changed = [name for name in FIELDS if name not in allowed and getattr(sequence, name) != was[name]]
            for name in changed:
                setattr(sequence, name, was[name])
            if changed:
                raise PolicyFault(
                    f"at {seconds(self._now_ps())} `{method}` changed {', '.join(changed)} of request {was['handle']};"
                    " it must not: a policy may only read the requests that it is given"
                ) from error


def _none(_sequence: Sequence, _was: Values, _arguments: tuple[Any, ...]) -> Collection[str]:
    return ()


def _by_pass(sequence: Sequence, was: Values, arguments: tuple[Any, ...]) -> Collection[str]:
    admission, _, at_ps = arguments
    allowed: set[str] = set()
    if sequence.admitted_ps == at_ps and any(one is sequence for one in admission.admitted):
        allowed.add("admitted_ps")
    return allowed | _by_await(sequence, was, at_ps)


def _by_await(sequence: Sequence, was: Values, at_ps: int) -> set[str]:
    """Return which of its waits for adapters are what they are after a try that lacked its adapter."""
    if sequence.adapter is None or sequence.load_end is None:
        return set()
    tried = Sequence(0, 1, 1)
    for name in _READ_BY_AWAIT:
        setattr(tried, name, was[name])
    tried.await_adapter(sequence.load_end, at_ps)
    alike = {name for name in _LOAD if getattr(tried, name) == getattr(sequence, name)}
    return alike if "load_wait_ps" in alike else set()


def _by_cancel(sequence: Sequence, was: Values, arguments: tuple[Any, ...]) -> Collection[str]:
    """Strict queues mark what they are to sweep."""
    return ("aborted",) if arguments == (was["handle"],) and sequence.aborted else ()


def _by_context(sequence: Sequence, was: Values, arguments: tuple[Any, ...]) -> Collection[str]:
    context = arguments[0]
    allowed = set(_BY_CONTEXT)
    if sequence.num_requeues == was["num_requeues"] + 1:
        allowed |= _BY_PREEMPTION
    if sequence.handle in context.running.held:
        allowed.add("held_output_tokens")
    if sequence.handle in context.running.prefilling and sequence.cached_tokens == sequence.computed_tokens:
        allowed |= {"cached_tokens", "computed_tokens"}
    return allowed


_ALLOWED: dict[str, Allowed] = {"admit": _by_pass, "cancel": _by_cancel, "choose": _by_context}


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
