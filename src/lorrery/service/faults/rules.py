"""Chooses which injected faults apply to which requests and loads: rules that count their matches, and draw shares.

The same requests in the same order get the same faults, live and simulated; so do the loads of one worker. Counts start
at zero: per router for its requests, and per attachment of a worker for its loads.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b

from lorrery.service.faults.kinds import CUT, DELAY, LOAD_KINDS, REFUSE, REQUEST_KINDS, STALL, Fault
from lorrery.vocabulary.units import ENDLESS


@dataclass(frozen=True, slots=True)
class RequestFaults:
    """The faults of one request.

    Attributes:
        faults: all that apply, in order of the rules.
        delay_ps: how late it reaches a scheduler.
        refusal: the fault that ends it at once.
        cut: the fault that ends its stream after some tokens.
        stalls: in order of `after`.
    """

    faults: tuple[Fault, ...] = ()
    delay_ps: int = 0
    refusal: Fault | None = None
    cut: Fault | None = None
    stalls: tuple[Fault, ...] = ()


NO_FAULTS = RequestFaults()


def together(faults: Sequence[Fault]) -> RequestFaults:
    """Combine several request faults: delays add up, the first refusal and the earliest cut count."""
    if not faults:
        return NO_FAULTS
    by_kind = {kind: [fault for fault in faults if fault.kind == kind] for kind in REQUEST_KINDS}
    cuts = sorted(by_kind[CUT], key=lambda fault: fault.after)
    return RequestFaults(
        tuple(faults),
        sum(fault.duration_ps for fault in by_kind[DELAY]),
        by_kind[REFUSE][0] if by_kind[REFUSE] else None,
        cuts[0] if cuts else None,
        tuple(sorted(by_kind[STALL], key=lambda fault: fault.after)),
    )


class FaultRules:
    """Chooses the faults of each request, or of each load, in order.

    Args:
        faults: only those of `kinds` are used.
        kinds: the kinds to use.
        draws_for: name that varies the random draws.
        place: number of rules before these in the list; each position has its own draws.
    """

    def __init__(
        self,
        faults: Iterable[Fault] = (),
        kinds: Container[str] = REQUEST_KINDS,
        draws_for: str = "",
        place: int = 0,
    ) -> None:
        self.faults = tuple(fault for fault in faults if fault.kind in kinds)
        self.num_met = [0 for _ in self.faults]
        """How often each fault has applied."""
        self._num_fit = [0 for _ in self.faults]
        self._draws_for = draws_for
        self._place = place

    def choose(self, tenant_id: str, adapter_id: str, at_ps: int) -> list[Fault]:
        """Return the faults of the next request or load; `at_ps`: time since the origin of the faults' times."""
        chosen: list[Fault] = []
        for index, fault in enumerate(self.faults):
            if (
                fault.adapter not in ("", adapter_id)
                or fault.tenant not in ("", tenant_id)
                or not fault.goes_on_at(at_ps)
            ):
                continue
            number = self._num_fit[index]
            self._num_fit[index] += 1
            if (fault.first is not None and self.num_met[index] >= fault.first) or not self._drawn(index, number):
                continue
            self.num_met[index] += 1
            chosen.append(fault)
            if fault.kind == REFUSE:
                break  # a refused request gets no other fault, and no other rule counts it
        return chosen

    def _drawn(self, index: int, number: int) -> bool:
        fault = self.faults[index]
        if fault.share == 1:
            return True
        drawn = f"{fault.seed} {self._place + index} {number}" + (f" {self._draws_for}" if self._draws_for else "")
        digest = blake2b(drawn.encode(), digest_size=8).digest()
        return Fraction(int.from_bytes(digest, "big"), 2**64) < fault.share


@dataclass(slots=True, eq=False)
class RuleSet:
    """Faults that were set together.

    Attributes:
        faults: of any kind.
        from_ps: when they came into force, which is also the origin of their times.
        until_ps: when others replaced them; `ENDLESS`: still in force.
    """

    faults: tuple[Fault, ...]
    from_ps: int
    until_ps: int = ENDLESS

    @property
    def timed(self) -> list[Fault]:
        """The faults, with times on the clock of `from_ps`."""
        return [fault.begun_at(self.from_ps) for fault in self.faults]


class RuleBook:
    """The faults in force in a cluster, and since when: those of the settings, and those of an operator's calls."""

    MAX_REPLACED = 4
    """Replacements after which a set is dropped: a worker's time may lie before the last few replacements."""

    def __init__(self) -> None:
        self.planned: RuleSet | None = None
        self.operators: list[RuleSet] = []

    @property
    def sets(self) -> list[RuleSet]:
        """All sets, the settings' first."""
        return self.operators if self.planned is None else [self.planned, *self.operators]

    def plan(self, faults: Iterable[Fault], from_ps: int) -> None:
        """Put the settings' faults into force, unless they already are."""
        if self.planned is None:
            self.planned = RuleSet(tuple(faults), from_ps)

    def going_on(self, kind: str, worker: str, at_ps: int, *, by_operator: bool = False) -> Fault | None:
        """Return a fault of a kind that is active on a worker at a time, or None; `by_operator`: only an operator's."""
        for rule_set in self.operators if by_operator else self.sets:
            if rule_set.from_ps <= at_ps < rule_set.until_ps:
                for fault in rule_set.faults:
                    if fault.kind == kind and fault.concerns(worker) and fault.goes_on_at(at_ps - rule_set.from_ps):
                        return fault
        return None

    def rules_at(self, at_ps: int) -> list[str]:
        """Return the texts of all faults that are active at a time."""
        return [
            fault.text
            for one in self.sets
            if one.from_ps <= at_ps < one.until_ps
            for fault in one.faults
            if fault.goes_on_at(at_ps - one.from_ps)
        ]

    @property
    def current(self) -> list[RuleSet]:
        """An operator's sets that have not been replaced."""
        return [one for one in self.operators if one.until_ps == ENDLESS]

    def take(self, faults: Iterable[Fault], from_ps: int, *, add: bool = False) -> None:
        """Put an operator's faults into force at a time; without `add` they replace those of previous calls."""
        if not add:
            for one in self.current:
                one.until_ps = from_ps
            ends = sorted({one.until_ps for one in self.operators})[-self.MAX_REPLACED :]
            self.operators = [one for one in self.operators if one.until_ps in ends]
        self.operators.append(RuleSet(tuple(faults), from_ps))


class LoadRules:
    """Chooses the faults of each adapter load on one worker.

    Args:
        book: the rules.
        worker: name of the worker.
        met: called with each fault that applies.
    """

    def __init__(self, book: RuleBook, worker: str, met: Callable[[Fault], None] = lambda _fault: None) -> None:
        self._book = book
        self._worker = worker
        self._met = met
        self._rules: dict[int, tuple[RuleSet, FaultRules]] = {}

    def choose(self, adapter_id: str, at_ps: int) -> list[Fault]:
        """Return the faults of the next load, which begins at `at_ps`."""
        chosen: list[Fault] = []
        for rule_set in self._book.sets:
            if rule_set.from_ps <= at_ps < rule_set.until_ps and (rules := self._rules_of(rule_set)).faults:
                chosen += rules.choose("", adapter_id, at_ps - rule_set.from_ps)
        for fault in chosen:
            self._met(fault)
        return chosen

    def _rules_of(self, rule_set: RuleSet) -> FaultRules:
        known = self._rules.get(id(rule_set))
        if known is None:
            sets = self._book.sets
            before = [one for one in sets[: sets.index(rule_set)] if one.until_ps > rule_set.from_ps]
            place = sum(len(self._rules_of(one).faults) for one in before)
            own = [fault for fault in rule_set.faults if fault.concerns(self._worker)]
            kept = {id(one): self._rules[id(one)] for one in sets if id(one) in self._rules}
            known = rule_set, FaultRules(own, LOAD_KINDS, self._worker, place)
            # The set is kept beside its rules, so that its id cannot be reused.
            self._rules = {**kept, id(rule_set): known}
        return known[1]
