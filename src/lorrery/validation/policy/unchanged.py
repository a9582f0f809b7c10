"""Finds what a queue or a way to batch changes in the requests that it was handed, at the call that changes it.

Every field of every request of a case is compared around each call. Inside of some calls the core changes requests
itself, by the pass that a queue tries them in and by `context.admit`; such changes are told apart by what they must be.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from operator import attrgetter
from typing import Any

from lorrery.scheduler.core.sequence import Sequence
from lorrery.validation.policy.fault import PolicyFault, seconds

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
