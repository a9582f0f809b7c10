"""Queues from outside the tree whose answers make no sense, and some that only look so."""

from typing import Any

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.queues.base import ListedQueue
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter, Sequence


class Queue(ListedQueue):
    """First come first served."""

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        for sequence in self:
            if not admission.admit(sequence):
                break
        self._waiting.remove_all(admission.admitted)
        return []

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        return limit


class WakesNow(Queue):
    def wakes_at_ps(self, at_ps: int) -> int | None:
        return at_ps


class WakesBefore(Queue):
    def wakes_at_ps(self, at_ps: int) -> int | None:
        return at_ps - 5


class WakesInWords(Queue):
    def wakes_at_ps(self, at_ps: int) -> Any:
        return "soon"


class HoldsForNothing(Queue):
    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        return 0


class WakesLater(Queue):
    """A rule that looks every so often, whoever waits."""

    def wakes_at_ps(self, at_ps: int) -> int | None:
        assert len(self), "asked though nobody waits"
        return at_ps + 10**9


class LetsNobodyIn(Queue):
    """Names one time after another, and admits nobody."""

    ahead_ps = 1

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        return []

    def wakes_at_ps(self, at_ps: int) -> int | None:
        return at_ps + self.ahead_ps


class LetsNobodyInFor90Microseconds(LetsNobodyIn):
    ahead_ps = 90 * 10**6


class NeverAdmits(ListedQueue):
    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        return []


class HoldsBack(Queue):
    """Waits a few microseconds a few thousand times, and then admits."""

    num_times = 9_000
    ahead_ps = 5 * 10**6

    def __init__(self) -> None:
        super().__init__()
        self.times_left = self.num_times

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        if self.times_left > 0:
            self.times_left -= 1
            return []
        self.times_left = self.num_times
        return super().admit(admission, running, at_ps)

    def wakes_at_ps(self, at_ps: int) -> int | None:
        return at_ps + self.ahead_ps


class HoldsBackForLong(HoldsBack):
    num_times = 11_000
    ahead_ps = 100 * 10**6


class DropsOneAtATime(Queue):
    """Admits nobody; each time that it named is the end of one request."""

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        first = self.cancel(next(iter(self)).handle)
        return [] if first is None else [first]

    def wakes_at_ps(self, at_ps: int) -> int | None:
        return at_ps + 1


class WakesAtNan(Queue):
    def wakes_at_ps(self, at_ps: int) -> Any:
        return float("nan")


class HoldsForNan(Queue):
    def holds_for(self, running: Running, memory: Memory, limit: int) -> Any:
        return float("nan")


class AdmitsNone(Queue):
    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> Any:
        super().admit(admission, running, at_ps)


class AdmitsATuple(Queue):
    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> Any:
        return tuple(super().admit(admission, running, at_ps))


class ClaimsToBeEmpty(Queue):
    """Lets nobody in at first, and says that nobody waits."""

    def __len__(self) -> int:
        return 0

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        return super().admit(admission, running, at_ps) if at_ps else []


class ClaimsToHaveLess(ListedQueue):
    def __len__(self) -> int:
        return len(self._waiting) - 5

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        return []


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise KeyError("message")


class RaisesSpeechless(Queue):
    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        raise SpeechlessError


class RaisesHalfACharacter(Queue):
    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        raise ValueError("\ud800")


class DropsTheCancelled(Queue):
    def __init__(self) -> None:
        super().__init__()
        self.cancelled: list[Sequence] = []

    def cancel(self, handle: int) -> Sequence | None:
        found = super().cancel(handle)
        self.cancelled += [] if found is None else [found]
        return found

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        super().admit(admission, running, at_ps)
        dropped, self.cancelled = self.cancelled, []
        return dropped


class CancelsTheFirst(Queue):
    def cancel(self, handle: int) -> Sequence | None:
        return super().cancel(next(iter(self)).handle)


class KeepsTheAdmitted(Queue):
    def __init__(self) -> None:
        super().__init__()
        self.tried: set[int] = set()

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        for sequence in self:
            if sequence.handle not in self.tried and admission.admit(sequence):
                self.tried.add(sequence.handle)
        return []


class DropsAStranger(Queue):
    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        return [Sequence(99, 5, 5, 0)]


class Writes(Queue):
    """Changes a field of each request that waits, before the pass or after it."""

    field: str
    value: Any
    afterwards = False

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        waiting = list(self)
        dropped = super().admit(admission, running, at_ps) if self.afterwards else []
        for sequence in waiting:
            setattr(sequence, self.field, self.value)
        return dropped if self.afterwards else super().admit(admission, running, at_ps)


class WritesInput(Writes):
    field, value = "input_tokens", 7


class WritesInputAfterwards(WritesInput):
    afterwards = True


class WritesHandleAfterwards(Writes):
    field, value, afterwards = "handle", 7, True


class WritesHandle(Writes):
    field, value = "handle", 7


class WritesProduced(Writes):
    field, value = "produced_tokens", 3


class WritesAdapter(Writes):
    field, value = "adapter", Adapter("other", 8)


class MarksCached(Writes):
    """Has the prompts start with most of them computed."""

    field, value = "computed_tokens", 49


class MarksCachedAfterwards(MarksCached):
    afterwards = True


class MarksServed(Writes):
    field, value = "first_token_ps", 1


class MarksAdmitted(Writes):
    field, value = "first_admitted_ps", 1


class MarksRequeued(Writes):
    field, value = "num_requeues", 5


class MovesDeadline(Writes):
    field, value = "deadline_ps", 10**15


class WritesDropped(Queue):
    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        dropped = self.clear()
        for sequence in dropped:
            sequence.arrived_ps = 0
        return dropped


class WritesRunning(Queue):
    """Changes a field of each request that decodes, or is in prefill."""

    field, value = "base_step", 0
    in_prefill = False

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        for sequence in list(running.prefilling.values()) if self.in_prefill else running:
            setattr(sequence, self.field, self.value)
        return super().admit(admission, running, at_ps)

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        return 1


class ShortensRunning(WritesRunning):
    field, value = "budget_tokens", 1


class RenamesRunning(WritesRunning):
    field, value = "handle", 77


class ServesRunning(WritesRunning):
    field, value = "first_token_ps", 1


class ShortensInPrefill(WritesRunning):
    field, value = "budget_tokens", 1
    in_prefill = True


class AdmitsAStranger(Queue):
    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        admission.admit(Sequence(99, 5, 5, 0))
        return []


class AdmitsByHand(Queue):
    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        admission.admitted.extend(self.clear())
        return []


class Forgets(Queue):
    def append(self, sequence: Sequence, at_ps: int) -> None:
        if sequence.handle % 2:
            super().append(sequence, at_ps)
