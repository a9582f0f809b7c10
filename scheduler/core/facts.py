"""What the core says has happened: one stream of records, for whoever wants to know.

A driver gets facts from every call of the core, adds those that only it knows (a step's duration, a fault), and gives
them, in order, to its subscribers (`Facts.publish`). Both drivers have the same facts, so what is counted, recorded or
drawn from them is the same live and simulated. No fact is made per token, and a driver without subscribers makes none
for them.

Records made for every request or step are not frozen, though they are never changed: a frozen one takes three times as
long to make, and a simulation makes millions. They have an `__init__` of their own, which, unlike a dataclass's, mypyc
compiles.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lorrery.scheduler.core.refusals import DropReason
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.endings import FinishReason


@mypyc_attr(acyclic=True, free_list_len=1)
@dataclass(slots=True, init=False)
class Admitted:
    """A sequence entered the batch: once, and again after each preemption or loss of its worker.

    What counts requests counts only the first of these events; what counts all of them says so.

    Attributes:
        first: whether for the first time; then its `first_admitted_ps` and `first_cached_tokens` are set.
        queried_tokens: tokens that a look-up in the prefix cache counts for, of which `first_cached_tokens` were found.
            As in vLLM a request counts once, at its first admission, and one that skips the cache not at all.
    """

    sequence: Sequence
    first: bool
    queried_tokens: int

    def __init__(self, sequence: Sequence, first: bool = True, queried_tokens: int = 0) -> None:
        self.sequence = sequence
        self.first = first
        self.queried_tokens = queried_tokens


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A cancelled sequence has left and holds nothing; strict S-LoRA keeps its place in the queue until a sweep.

    Attributes:
        output_tokens: all that it has produced.
    """

    sequence: Sequence
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A waiting sequence was given up: its service level cannot be met, or its adapter could not be loaded."""

    sequence: Sequence
    reason: DropReason = DropReason.SERVICE_LEVEL


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence was given up because a decision that concerned it raised.

    Attributes:
        message: of the preceding `Raised`; for the operator, not for clients.
        output_tokens: all that it has produced.
    """

    sequence: Sequence
    message: str
    output_tokens: int


class Raised:
    """A policy raised an exception; the sequences that fail because of it follow.

    Not a dataclass: a compiled one cannot have an exception as a field.

    Attributes:
        message: which policy raised what.
        error: what was raised.
    """

    __slots__ = ("error", "message")
    __match_args__ = ("message", "error")

    def __init__(self, message: str, error: Exception) -> None:
        self.message = message
        self.error = error


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence lost its place in the batch and waits again; its KV is computed anew."""

    sequence: Sequence


@mypyc_attr(acyclic=True, free_list_len=1)
@dataclass(slots=True, init=False)
class FirstToken:
    """A sequence got its first token at this boundary."""

    sequence: Sequence
    at_ps: int

    def __init__(self, sequence: Sequence, at_ps: int) -> None:
        self.sequence = sequence
        self.at_ps = at_ps


@mypyc_attr(acyclic=True, free_list_len=1)
@dataclass(slots=True, init=False)
class Finished:
    """A sequence ended at this boundary and has left."""

    sequence: Sequence
    reason: FinishReason
    output_tokens: int
    at_ps: int

    def __init__(self, sequence: Sequence, reason: FinishReason, output_tokens: int, at_ps: int) -> None:
        self.sequence = sequence
        self.reason = reason
        self.output_tokens = output_tokens
        self.at_ps = at_ps


def ended(sequence: Sequence, reason: FinishReason, output_tokens: int, at_ps: int) -> Finished:
    """Return the event of a sequence that has ended by itself, or because its router had cut it by then.

    A cut in whose last step the sequence ended anyway is still a cut: what follows the stop string is dropped. Only
    stamps decide, not the order in which live messages arrive.
    """
    withdrawal = sequence.withdrawal
    if withdrawal is not None and withdrawal.at_ps <= at_ps and (cut := withdrawal.cause.finish) is not None:
        kept = output_tokens if withdrawal.kept_tokens is None else withdrawal.kept_tokens
        return Finished(sequence, cut, kept, withdrawal.at_ps)
    return Finished(sequence, reason, output_tokens, at_ps)


def withdrawn(sequence: Sequence, output_tokens: int) -> "Cancelled | Finished":
    """Return the event of a cancelled sequence that leaves: by its cause it has finished, or not.

    Args:
        sequence: it holds nothing any more.
        output_tokens: all that it has produced.
    """
    withdrawal = sequence.withdrawal
    if withdrawal is None or withdrawal.cause.finish is None:
        return Cancelled(sequence, output_tokens)
    return ended(sequence, withdrawal.cause.finish, output_tokens, withdrawal.at_ps)


@dataclass(frozen=True, slots=True)
class AdaptersKept:
    """All resident adapters except these, by key, were removed from the device's memory."""

    adapter_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recalled:
    """A waiting sequence has left the worker to move to another (`to`, if that is still attached)."""

    sequence: Sequence
    to: str


Event = Admitted | Cancelled | Recalled | Dropped | Failed | Preempted | Raised | FirstToken | Finished | AdaptersKept


@dataclass(frozen=True, slots=True)
class LoadBegan:
    """A load onto the GPU has begun.

    Attributes:
        tier: source of the load: `host` or `disk`.
        thrash: the adapter was evicted from this GPU within a minute before.
    """

    adapter: Adapter
    tier: str
    at_ps: int
    thrash: bool


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load has ended, `took_ps` after it began; one that failed may be tried again."""

    adapter: Adapter
    tier: str
    at_ps: int
    took_ps: int
    failed: bool


@dataclass(frozen=True, slots=True)
class Evicted:
    """An adapter has left a level of memory, `gpu` or `host`, on the GPU `stayed_ps` after its load."""

    adapter: Adapter
    level: str
    at_ps: int
    stayed_ps: int = 0


@dataclass(frozen=True, slots=True)
class AdapterLost:
    """An adapter has left the GPU because its worker is gone."""

    adapter: Adapter
    at_ps: int
    stayed_ps: int


@dataclass(frozen=True, slots=True)
class Activated:
    """An adapter that a load had brought into host memory alone has got a place on the GPU."""

    adapter: Adapter
    at_ps: int


AdapterEvent = LoadBegan | LoadEnded | Evicted | AdapterLost | Activated
ADAPTER_FACTS: Final = (LoadBegan, LoadEnded, Evicted, AdapterLost, Activated)


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """Requests may name an adapter, or another version of it, from now on."""

    adapter_id: str
    rank: int
    version: int


@dataclass(frozen=True, slots=True)
class AdapterUnloaded:
    """No new request may name an adapter any more."""

    adapter_id: str


@dataclass(frozen=True, slots=True)
class FaultBegan:
    """An injected fault holds from now on."""

    text: str


# --- subscribers -----------------------------------------------------------------------------------------------------

Handler = Callable[[Any, int, Any], None]
"""Takes a fact of one type, and with it

at_ps: when: the boundary of a decision, the end of a step, or now; a fact with a time of its own has it;
member: the `Member` whose decision or step it was; None: it is the scheduler's.
"""


class Subscriber(Protocol):
    """Whoever wants to know what happens."""

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """What it wants to know: a handler for each type of fact."""
        ...


class Facts:
    """Gives facts to subscribers, in order; a fact that nobody wants costs one look-up.

    Args:
        subscribers: a fact goes to each of them in this order, before the next fact does.
    """

    def __init__(self, subscribers: Iterable[Subscriber] = ()) -> None:
        self._subscribers: list[Subscriber] = []
        self._handlers: dict[type, list[Handler]] = {}
        for subscriber in subscribers:
            self.subscribe(subscriber)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Add a subscriber, behind the others."""
        self._subscribers.append(subscriber)
        for kind, handler in subscriber.handlers.items():
            self._handlers.setdefault(kind, []).append(handler)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Remove a subscriber."""
        left = [one for one in self._subscribers if one is not subscriber]
        self._subscribers, self._handlers = [], {}
        for one in left:
            self.subscribe(one)

    def wants(self, *kinds: type) -> bool:
        """Return whether anybody wants facts of one of these types."""
        return not self._handlers.keys().isdisjoint(kinds)

    def publish(self, facts: Iterable[object], at_ps: int, member: object = None) -> None:
        """Give facts to those who want them; see `Handler`."""
        handlers = self._handlers
        for fact in facts:
            wanted = handlers.get(type(fact))
            if wanted is not None:
                for handle in wanted:
                    handle(fact, at_ps, member)
