"""Which faults on request happen to whom: rules that count what they fit, and draw for it.

The same requests in the same order meet the same faults, live and simulated; so do the loads of one worker. Whoever
counts starts at zero: a router for the requests that it gets, a worker's replica for its loads, each time it attaches.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b

from lorrery.chassis.faults import CUT, DELAY, LOAD_KINDS, REFUSE, REQUEST_KINDS, STALL, Fault
from lorrery.vocabulary.units import ENDLESS


@dataclass(frozen=True, slots=True)
class RequestFaults:
    """What is to go wrong with one request.

    Attributes:
        faults: all that were chosen, in order of the rules.
        delay_ps: how late it reaches a scheduler.
        refusal: with which it ends at once.
        cut: after whose tokens its stream ends.
        stalls: in order of `after`.
    """

    faults: tuple[Fault, ...] = ()
    delay_ps: int = 0
    refusal: Fault | None = None
    cut: Fault | None = None
    stalls: tuple[Fault, ...] = ()


NO_FAULTS = RequestFaults()


def together(faults: Sequence[Fault]) -> RequestFaults:
    """Return what several faults of requests do to one: delays add up, the first refusal and the earliest cut count."""
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
    """Chooses what goes wrong with each request, or with each load, in their order.

    Args:
        faults: those of some kinds count; others are left alone.
        kinds: which.
        draws_for: another name draws other shares.
        place: how many rules stand before these in the list; each place draws for itself.
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
        """How often each fault has happened."""
        self._num_fit = [0 for _ in self.faults]
        self._draws_for = draws_for
        self._place = place

    def choose(self, tenant_id: str, adapter_id: str, at_ps: int) -> list[Fault]:
        """Return the faults of the next request or load, which comes so long after their times began to count."""
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
                break  # no other fault happens to it, and none counts it
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
    """Faults that were given together.

    Attributes:
        faults: of any kind.
        from_ps: since when they hold, and their times count.
        until_ps: when others took their place; `ENDLESS`: none have.
    """

    faults: tuple[Fault, ...]
    from_ps: int
    until_ps: int = ENDLESS

    @property
    def timed(self) -> list[Fault]:
        """The faults with their times on the clock of `from_ps`."""
        return [fault.begun_at(self.from_ps) for fault in self.faults]


class RuleBook:
    """The faults that hold in a cluster, and since when: the settings', and those of an operator's calls."""

    MAX_REPLACED = 4
    """Replacements after which a set is forgotten: a worker may be at a time before the last ones."""

    def __init__(self) -> None:
        self.planned: RuleSet | None = None
        self.operators: list[RuleSet] = []

    @property
    def sets(self) -> list[RuleSet]:
        """All, the settings' first."""
        return self.operators if self.planned is None else [self.planned, *self.operators]

    def plan(self, faults: Iterable[Fault], from_ps: int) -> None:
        """Let the settings' faults hold from now on, unless they do already."""
        if self.planned is None:
            self.planned = RuleSet(tuple(faults), from_ps)

    def going_on(self, kind: str, worker: str, at_ps: int, *, by_operator: bool = False) -> Fault | None:
        """Return a fault of a kind that happens to a worker at a time, be it only if an operator has set it."""
        for rule_set in self.operators if by_operator else self.sets:
            if rule_set.from_ps <= at_ps < rule_set.until_ps:
                for fault in rule_set.faults:
                    if fault.kind == kind and fault.concerns(worker) and fault.goes_on_at(at_ps - rule_set.from_ps):
                        return fault
        return None

    @property
    def current(self) -> list[RuleSet]:
        """Those of an operator that none has replaced."""
        return [one for one in self.operators if one.until_ps == ENDLESS]

    def take(self, faults: Iterable[Fault], from_ps: int, *, add: bool = False) -> None:
        """Let an operator's faults hold from a time on, in place of those of the calls before unless they `add`."""
        if not add:
            for one in self.current:
                one.until_ps = from_ps
            ends = sorted({one.until_ps for one in self.operators})[-self.MAX_REPLACED :]
            self.operators = [one for one in self.operators if one.until_ps in ends]
        self.operators.append(RuleSet(tuple(faults), from_ps))


class LoadRules:
    """Chooses what goes wrong with each load of an adapter on one worker.

    Args:
        book: whose rules hold.
        worker: its name.
        met: told of each fault that happens.
    """

    def __init__(self, book: RuleBook, worker: str, met: Callable[[Fault], None] = lambda _fault: None) -> None:
        self._book = book
        self._worker = worker
        self._met = met
        self._rules: dict[int, tuple[RuleSet, FaultRules]] = {}

    def choose(self, adapter_id: str, at_ps: int) -> list[Fault]:
        """Return the faults of the next load, which begins at this time."""
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
            # The set is kept beside its rules, so that no other one has its id.
            self._rules = {**kept, id(rule_set): known}
        return known[1]
