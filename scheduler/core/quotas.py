"""Use of API keys' quotas: requests and tokens per minute, requests on workers, waiting requests.

A rate is a token bucket (a key that was quiet for a minute may spend the minute's share at once, after which it fills
evenly) in whole numbers, so that every driver decides alike: a level counts tokens x picoseconds, fills by
`per_minute` each picosecond, and one token costs a minute of picoseconds. A request is charged its prompt and maximum
output on arrival; what it did not produce is given back when it ends, and everything if it is withdrawn because another
output of its client's request was refused.

Over `max_running` a sequence is held before it is placed, so that it takes no place in a worker's queue.
"""

from dataclasses import dataclass
from fractions import Fraction

from lorrery.scheduler.core import refusals
from lorrery.scheduler.core.refusals import Refusal
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.endings import CancelCause
from lorrery.vocabulary.units import PS_PER_SECOND

MINUTE_PS = 60 * PS_PER_SECOND
MAX_IDLE_KEYS = 10_000
"""Beyond this many keys, those without open requests are forgotten, together with their use of the current minute."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What a key may use; 0: no limit.

    Attributes:
        key: its name, under which it is counted.
        requests_per_minute: arriving requests.
        tokens_per_minute: prompt and output tokens.
        max_running: requests on workers, in a queue there or in a batch.
        max_waiting: requests that are in no batch.
        weight: the tenant's under a policy that is fair between tenants; None: as the settings say.
    """

    key: str
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_running: int = 0
    max_waiting: int = 0
    weight: Fraction | None = None

    @property
    def limits(self) -> bool:
        """Whether there is anything to count."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.max_running or self.max_waiting)


class _Bucket:
    """A token bucket, initially full."""

    __slots__ = ("_at_ps", "_level", "_per_minute")

    def __init__(self, per_minute: int, at_ps: int) -> None:
        self._per_minute = per_minute
        self._level = per_minute * MINUTE_PS
        self._at_ps = at_ps

    def wait_ps(self, amount: int, at_ps: int) -> int:
        """Return after how long `amount` can be taken; 0: now."""
        self._fill(at_ps)
        lacking = amount * MINUTE_PS - self._level
        return 0 if lacking <= 0 else -(-lacking // self._per_minute)

    def take(self, amount: int, at_ps: int) -> None:
        """Take `amount`; a negative one is given back."""
        self._fill(at_ps)
        self._level = min(self._level - amount * MINUTE_PS, self._per_minute * MINUTE_PS)

    def change(self, per_minute: int, at_ps: int) -> None:
        """Fill at another rate from now on."""
        self._fill(at_ps)
        self._per_minute = per_minute
        self._level = min(self._level, per_minute * MINUTE_PS)

    def _fill(self, at_ps: int) -> None:
        filled = self._level + self._per_minute * (at_ps - self._at_ps)
        self._level = min(filled, self._per_minute * MINUTE_PS)
        self._at_ps = at_ps


def _changed(bucket: _Bucket | None, per_minute: int, at_ps: int) -> _Bucket | None:
    """Return a bucket with a new rate, a full one if there was none; None for no limit."""
    if not per_minute:
        return None
    if bucket is None:
        return _Bucket(per_minute, at_ps)
    bucket.change(per_minute, at_ps)
    return bucket


class _Use:
    """What one key uses.

    Attributes:
        open: its accepted sequences that have not ended, by handle.
        held: those of them that wait for a slot of `max_running`, in order.
        charged: tokens charged for each of them, by handle.
    """

    __slots__ = ("charged", "held", "open", "quota", "requests", "tokens")

    def __init__(self, quota: Quota, at_ps: int) -> None:
        self.quota = quota
        self.open: dict[int, Sequence] = {}
        self.held: dict[int, Sequence] = {}
        self.charged: dict[int, int] = {}
        self.requests = _changed(None, quota.requests_per_minute, at_ps)
        self.tokens = _changed(None, quota.tokens_per_minute, at_ps)

    def change(self, quota: Quota, at_ps: int) -> None:
        """Apply another quota from now on: the file of keys has changed."""
        if quota != self.quota:
            self.requests = _changed(self.requests, quota.requests_per_minute, at_ps)
            self.tokens = _changed(self.tokens, quota.tokens_per_minute, at_ps)
        self.quota = quota

    def pay(self, requests: int, tokens: int, at_ps: int) -> None:
        """Take from both rates; negative numbers are given back."""
        if requests and self.requests is not None:
            self.requests.take(requests, at_ps)
        if tokens and self.tokens is not None:
            self.tokens.take(tokens, at_ps)

    def has_room(self) -> bool:
        """Return whether one more sequence may go to a worker."""
        most = self.quota.max_running
        return not most or len(self.open) - len(self.held) < most


class Quotas:
    """The counts of one scheduler."""

    def __init__(self) -> None:
        self._by_key: dict[str, _Use] = {}
        self._by_handle: dict[int, _Use] = {}
        self._may_release: dict[str, _Use] = {}

    @property
    def num_held(self) -> int:
        """Sequences that wait for a slot of their key's `max_running`; linear in keys."""
        return sum([len(use.held) for use in self._by_key.values()])

    def held(self) -> list[Sequence]:
        """Return the sequences that wait for a slot of their key's `max_running`."""
        return [sequence for use in self._by_key.values() for sequence in use.held.values()]

    @property
    def any_to_release(self) -> bool:
        """Whether `release` may have something to do."""
        return bool(self._may_release)

    def refuse(self, sequence: Sequence, quota: Quota, at_ps: int) -> Refusal | None:
        """Return why a key may not send this request now; None: it may. Counts nothing."""
        use = self._use(quota, at_ps)
        if quota.max_waiting and len(use.open) >= quota.max_waiting:
            num_waiting = sum([one.admitted_ps is None for one in use.open.values()])
            if num_waiting >= quota.max_waiting:
                return refusals.too_many_waiting(num_waiting, quota.max_waiting)
        return self._over_rate(use, _charge(sequence), at_ps)

    def charge(self, tokens: int, quota: Quota, at_ps: int) -> Refusal | None:
        """Count something that is a request but for its output; return why the key may not have it now, None: it may.

        Args:
            tokens: of its prompt.
            quota: of its key.
            at_ps: now.
        """
        use = self._use(quota, at_ps)
        refusal = self._over_rate(use, tokens, at_ps)
        if refusal is None:
            use.pay(1, tokens, at_ps)
        return refusal

    @staticmethod
    def _over_rate(use: _Use, tokens: int, at_ps: int) -> Refusal | None:
        quota = use.quota
        wait_ps = 0 if use.requests is None else use.requests.wait_ps(1, at_ps)
        if wait_ps:
            return refusals.over_rate("requests_per_minute", 1, quota.requests_per_minute, wait_ps)
        wait_ps = 0 if use.tokens is None else use.tokens.wait_ps(tokens, at_ps)
        if wait_ps:
            return refusals.over_rate("tokens_per_minute", tokens, quota.tokens_per_minute, wait_ps)
        return None

    def take(self, sequence: Sequence, quota: Quota, at_ps: int, *, charge: bool) -> bool:
        """Count a sequence; return whether it may go to a worker now. If not, it is held.

        Args:
            sequence: not refused.
            quota: of its key.
            at_ps: now.
            charge: whether it is new. A returning one was charged before, and keeps its slot.
        """
        use = self._use(quota, at_ps)
        handle = sequence.handle
        goes = not charge or use.has_room()
        use.open[handle] = sequence
        self._by_handle[handle] = use
        if charge:
            use.charged[handle] = _charge(sequence)
            use.pay(1, use.charged[handle], at_ps)
        if not goes:
            use.held[handle] = sequence
        return goes

    def withdraw(self, handle: int) -> Sequence | None:
        """Stop holding a sequence that is cancelled, and return it; None: it is not held. `end` is still to come."""
        use = self._by_handle.get(handle)
        return None if use is None else use.held.pop(handle, None)

    def end(self, sequence: Sequence, output_tokens: int, at_ps: int) -> None:
        """Stop counting a sequence that has ended; one that is not counted is ignored.

        Args:
            sequence: wherever it was.
            output_tokens: all that it produced.
            at_ps: now.
        """
        use = self._by_handle.pop(sequence.handle, None)
        if use is None:
            return
        del use.open[sequence.handle]
        use.held.pop(sequence.handle, None)
        charged = use.charged.pop(sequence.handle, None)
        if charged is not None:
            if sequence.withdrawal is not None and sequence.withdrawal.cause is CancelCause.REFUSED_TOGETHER:
                use.pay(-1, -charged, at_ps)
            else:
                use.pay(0, min(0, sequence.prompt_tokens + output_tokens - charged), at_ps)
        if use.held and use.has_room():
            self._may_release[use.quota.key] = use

    def release(self) -> list[Sequence]:
        """Release the held sequences for which there is a slot now, in order; they count as being on workers."""
        released: list[Sequence] = []
        for use in self._may_release.values():
            while use.held and use.has_room():
                released.append(use.held.pop(next(iter(use.held))))
        self._may_release.clear()
        return released

    def _use(self, quota: Quota, at_ps: int) -> _Use:
        use = self._by_key.get(quota.key)
        if use is None:
            if len(self._by_key) >= MAX_IDLE_KEYS:
                self._by_key = {key: one for key, one in self._by_key.items() if one.open}
            use = self._by_key[quota.key] = _Use(quota, at_ps)
        elif use.quota is not quota:
            use.change(quota, at_ps)
            if use.held and use.has_room():
                self._may_release[quota.key] = use
        return use


def _charge(sequence: Sequence) -> int:
    return sequence.prompt_tokens + sequence.max_new_tokens
