"""Fair between adapters, or between tenants: the one that was served least goes next (virtual token counters).

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024); S-LoRA's `vtc_fair`
(slora/server/router/vtc_req_queue.py, commit c1ddf48). Each adapter has a first-come queue and a counter of the service
it got, divided by its weight:

    at admission     counter += input price x input tokens / weight           price 1
    per decode step  counter += output price x decoding sequences / weight    price 2; the prefill's token is free

A pass takes the head of the adapter with the smallest counter (ties: seen first), again and again, and ends at the
first refusal. An adapter that has requests queued again after having had none is lifted to the smallest counter of
those with queued requests, so that idling saves up nothing; if there are none, to the counter of the last that had any.
A sequence that waits for a load is passed over, within the bound of `AdmissionPass`.

Bound (the paper's lemma 4.3 and theorem 4.4): as long as two adapters have requests waiting, their counters differ by
at most U, and the service they get in any interval of that time, by weight, by at most 2 U, where

    U = max(input price x longest input, output price x tokens of the pool) / smallest weight.

One that is passed over falls behind by the service of the sequences that enter meanwhile, at most `max_overtakes`.

Counters are integers: a charge of price / weight is scaled by the least common multiple of the weights' numerators.

`by_tenant`: a tenant takes the place of an adapter above, as in the paper, whose clients are tenants. A sequence may
bring the weight of its tenant (API keys do), so weights are not known beforehand, and charges are rounded to a
billionth.

`max_running` bounds how many sequences of one adapter or tenant run at once. Without it a single one may fill the
batch, and later ones wait until places are free: fair in tokens served, but at a multiple of the time to first token
that they had before. With it places are kept free, even if no others arrive.

`strict` keeps S-LoRA's:

* `no_lift_when_empty`: an adapter is not lifted if no other has requests waiting, so one that idled while others ran
  without a queue has saved that up, and the bound does not hold.
* `popped_stay_listed`: a cancelled request met by a pass that formed no batch has left its adapter's queue, but is
  listed as waiting for good. Without it a cancelled request leaves at once.

One bug is not kept: a request for the base model, or for an adapter that was not registered, ends the original's loop
with a KeyError and hangs the server; here it has weight 1, strict or not.

Cost: a pass O(waiting adapters) and O(log) of it per admission; a commit O(distinct running adapters). Neither grows
with the queue.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heapreplace
from math import lcm

from lorrery.scheduler.core.admission import AdmissionPass, Blocked
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.queues.base import prompts_within, steps_until_admissible
from lorrery.scheduler.core.queues.waiting import WaitingList
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr

INPUT_PRICE = 1
OUTPUT_PRICE = 2


class _Flow:
    """One adapter or tenant: its queue, its counter, and its place in the order of first sight."""

    def __init__(self, owner: str | None, place: int, charge: int) -> None:
        self.owner = owner
        self.waiting = WaitingList()
        self.counter = 0
        self.place = place
        self.charge = charge  # counter units per token at price 1


class _Turns:
    """Waiting sequences in the order in which they would be served, as if each were charged its input.

    Args:
        flows: those with waiting sequences, all different.
        places: most sequences of each adapter or tenant; None: no limit.

    Attributes:
        heads: a heap of each flow's counter, with the charges for those already given, its place, and what it has left.
        counter: of the flow of the sequence last given, without the charge for that one.
    """

    def __init__(self, flows: Iterable[_Flow], places: dict[str | None, int] | None = None) -> None:
        self.heads = [
            (flow.counter, flow.place, iter(flow.waiting), flow)
            for flow in flows
            if places is None or places[flow.owner] > 0
        ]
        heapify(self.heads)  # places differ, so the iterators are never compared
        self.counter = 0
        self._places = places
        self._left_out: set[int] = set()

    def next(self) -> Sequence | None:
        """Return the sequence whose turn it is; None: no more."""
        heads, places = self.heads, self._places
        while heads:
            counter, place, waiting, flow = heads[0]
            sequence = None if place in self._left_out else next(waiting, None)
            if sequence is None:
                heappop(heads)
                continue
            if not sequence.aborted:
                if places is not None:
                    if not places[flow.owner]:
                        heappop(heads)
                        continue
                    places[flow.owner] -= 1
                heapreplace(heads, (counter + _input_charge(sequence, flow.charge), place, waiting, flow))
                self.counter = counter
            return sequence
        return None

    def give_back(self, flow: _Flow) -> None:
        """Take back a sequence's place: it does not enter."""
        if self._places is not None:
            self._places[flow.owner] += 1

    def leave_out(self, flow: _Flow) -> None:
        """Give no more sequences of a flow."""
        self._left_out.add(flow.place)

    def rivals(self, than: _Flow) -> list[tuple[int, int, _Flow]]:
        """Return counter and place of each other flow that may still have a turn, in no order."""
        return [
            (counter, place, flow)
            for counter, place, _, flow in self.heads
            if flow is not than and place not in self._left_out
        ]


@dataclass(frozen=True, slots=True)
class _Turn:
    """The sequence that ended a pass: its flow, the limit it met, and the others in their order."""

    flow: _Flow
    sequence: Sequence
    blocked: Blocked
    turns: _Turns


@mypyc_attr(allow_interpreted_subclasses=True)
class VtcFair:
    """Virtual token counters.

    Args:
        weights: adapter id (or tenant) to weight, positive; one of weight 2 gets twice as much. Missing: 1.
        strict: keep S-LoRA's handling of cancelled requests.
        by_tenant: be fair between tenants instead of adapters.
        max_running: most sequences of one adapter or tenant that run at once; None: no limit.
    """

    arrivals_read_state = True  # the lift compares counters

    def __init__(
        self,
        weights: Mapping[str, Fraction] | None = None,
        *,
        strict: bool = False,
        by_tenant: bool = False,
        max_running: int | None = None,
    ) -> None:
        self.strict = strict
        self._max_running = max_running
        self._by_tenant = by_tenant
        self._owner = _tenant_id if by_tenant else _adapter_id
        self._weights = dict(weights or {})
        self.unit = lcm(*(weight.numerator for weight in self._weights.values())) * (10**9 if by_tenant else 1)
        """Counter units per token at price 1 and weight 1."""
        self._flows: dict[str | None, _Flow] = {}  # in order of first sight
        self._backlogged: dict[str | None, _Flow] = {}
        self._last_backlogged: _Flow | None = None
        self._listed = WaitingList()
        self._turn: _Turn | None = None
        self._passed: set[str | None] = set()  # adapters or tenants passed over in the last pass

    def __len__(self) -> int:
        return len(self._listed)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._listed)

    def served(self) -> dict[str | None, Fraction]:
        """Return the service that each adapter or tenant got, by weight; in order of first sight."""
        return {adapter_id: Fraction(flow.counter, self.unit) for adapter_id, flow in self._flows.items()}

    def append(self, sequence: Sequence, at_ps: int) -> None:
        """Add a sequence, and lift its adapter or tenant if it had none waiting."""
        self._listed.append(sequence)
        owner = self._owner(sequence)
        flow = self._flows.get(owner)
        if flow is None:
            flow = self._flows[owner] = _Flow(owner, len(self._flows), self._charge(owner, sequence))
        elif self._by_tenant:
            flow.charge = self._charge(owner, sequence)  # its API key may have another weight by now
        if not len(flow.waiting):
            if self._backlogged:
                flow.counter = max(flow.counter, min(other.counter for other in self._backlogged.values()))
            elif self._last_backlogged is not None and not self.strict:
                flow.counter = max(flow.counter, self._last_backlogged.counter)
            self._backlogged[owner] = flow
        flow.waiting.append(sequence)

    def _charge(self, owner: str | None, sequence: Sequence) -> int:
        """Return the counter units of a token at price 1."""
        own = sequence.weight if self._by_tenant else None
        return max(1, round(self.unit / (own or self._weights.get(owner or "", Fraction(1)))))

    def _decoding(self, running: Running) -> Mapping[str | None, int]:
        return running.decoding_by_tenant() if self._by_tenant else running.decoding_by_adapter()

    def cancel(self, handle: int) -> Sequence | None:
        """Remove and return a waiting sequence; in strict mode only mark and return it, the first time."""
        if self.strict:
            return self._listed.mark(handle)
        sequence = self._listed.pop(handle)
        if sequence is not None:
            self._unqueue(sequence)
        return sequence

    def clear(self) -> list[Sequence]:
        """Remove and return all sequences, in order of arrival; the counters stay."""
        for flow in self._backlogged.values():
            flow.waiting.clear()
        self._backlogged.clear()
        self._turn = None
        return self._listed.clear()

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Admit in order of counters, and charge the inputs."""
        self._turn = None
        self._passed.clear()
        cancelled: list[Sequence] = []
        turns = _Turns(self._backlogged.values(), self._places(running))
        while (sequence := turns.next()) is not None:
            if sequence.aborted:
                cancelled.append(sequence)
            elif not admission.admit(sequence):
                assert admission.refused is not None
                owner = self._owner(sequence)
                flow = self._flows[owner]
                if not admission.pass_over():
                    self._turn = _Turn(flow, *admission.refused, turns)
                    break
                self._passed.add(owner)
                turns.give_back(flow)
                if not self._by_tenant:  # all sequences of an adapter wait for the same load
                    turns.leave_out(flow)
        for sequence in admission.admitted:
            flow = self._flows[self._owner(sequence)]
            flow.counter += _input_charge(sequence, flow.charge)
        for sequence in (*admission.admitted, *cancelled):
            self._unqueue(sequence)
        if admission.admitted:
            self._listed.remove_all((*admission.admitted, *cancelled))
        return []

    def _places(self, running: Running) -> dict[str | None, int] | None:
        """Return how many more may run for each waiting adapter or tenant; None: no limit."""
        if self._max_running is None:
            return None
        numbers = dict(self._decoding(running))
        for sequence in running.prefilling.values():
            owner = self._owner(sequence)
            numbers[owner] = numbers.get(owner, 0) + 1
        return {owner: self._max_running - numbers.get(owner, 0) for owner in self._backlogged}

    def _unqueue(self, sequence: Sequence) -> None:
        owner = self._owner(sequence)
        flow = self._flows[owner]
        if flow.waiting.pop(sequence.handle) is not None and not len(flow.waiting):
            self._last_backlogged = self._backlogged.pop(owner)

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return when the sequence whose turn it is may fit, or when another that has not been tried gets its turn.

        Counters of running adapters or tenants grow with every step, so another may come to have the smallest. Those
        passed over may come to be behind the one whose turn it is, which then ends the pass sooner; but if it waits
        for its adapter as well, it may then be among those that others overtake: this returns 1.
        """
        turn = self._turn
        if turn is None or turn.blocked is Blocked.COUNT:
            return limit
        limit = steps_until_admissible((turn.sequence, turn.blocked), running, memory, limit)
        if limit == 1:
            return limit
        decoding = self._decoding(running)
        growth = OUTPUT_PRICE * decoding.get(turn.flow.owner, 0) * turn.flow.charge
        if turn.blocked is Blocked.ADAPTER:
            for owner in self._passed:
                if OUTPUT_PRICE * decoding.get(owner, 0) * self._flows[owner].charge > growth:
                    return 1
        if not growth:
            return limit
        counter, own_place = turn.turns.counter, turn.flow.place
        for other_counter, place, flow in turn.turns.rivals(turn.flow):
            gain = growth - OUTPUT_PRICE * decoding.get(flow.owner, 0) * flow.charge
            if gain > 0:
                limit = min(limit, max(1, -(-(other_counter - counter + (place > own_place)) // gain)))
        return limit

    def wakes_at_ps(self, at_ps: int) -> int | None:
        """Return None: time alone changes nothing."""
        return None

    def at_rest(self) -> bool:
        """Return whether nothing waits but cancelled sequences that no pass will meet again."""
        return not self._backlogged

    def arrivals_matter(self) -> bool:
        """Return True: an arrival could enter, as its adapter may have been served least."""
        return True

    def look_ahead(self, max_prompt_tokens: int) -> list[Sequence]:
        """Return the sequences that would be next if only the prompt limit counted. The original has no look-ahead."""
        turns = _Turns(self._backlogged.values())
        if not self._by_tenant:
            for owner in self._passed:
                turns.leave_out(self._flows[owner])
        return prompts_within(iter(turns.next, None), max_prompt_tokens)

    def decoded(self, running: Running, num_steps: int) -> None:
        """Charge every decoding sequence's adapter or tenant for its tokens."""
        price = OUTPUT_PRICE * num_steps
        for owner, num_decoding in self._decoding(running).items():
            flow = self._flows.get(owner)
            if flow is not None:
                flow.counter += price * num_decoding * flow.charge


def _adapter_id(sequence: Sequence) -> str | None:
    """Return the owner for fairness: an adapter, with all its versions; None is the base model."""
    return None if sequence.adapter is None else sequence.adapter.adapter_id


def _tenant_id(sequence: Sequence) -> str | None:
    """Return the owner for fairness: the tenant; requests without one are one tenant."""
    return sequence.tenant_id


def _input_charge(sequence: Sequence, charge: int) -> int:
    """Return what admission adds to the counter; a requeued sequence has been charged before."""
    return 0 if sequence.num_requeues else INPUT_PRICE * sequence.input_tokens * charge
