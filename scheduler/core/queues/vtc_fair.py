"""Fair between adapters: the one that has been served least goes next (virtual token counters).

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024); S-LoRA's `vtc_fair`
(slora/server/router/vtc_req_queue.py, commit c1ddf48). Each adapter has a first-come queue and a counter of what it was
served, divided by its weight:

    at admission     counter += input price x input tokens / weight           price 1
    per decode step  counter += output price x decoding sequences / weight    price 2; the prefill's token is free

A pass takes the head of the adapter with the smallest counter (ties: seen first), again and again, and ends at the
first refusal. An adapter that comes back from having nothing queued is lifted to the smallest counter of those that
have, so that idling saves up nothing; if none has, to the counter of the one that was the last to have.

Bound (the paper's lemma 4.3 and theorem 4.4): as long as two adapters have requests waiting, their counters differ by
at most U, and what they are served in any interval of that time, by weight, by at most 2 U, where

    U = max(input price x longest input, output price x tokens of the pool) / smallest weight.

Counters are integers: a charge of price / weight is scaled by the least common multiple of the weights' numerators.

`strict` keeps S-LoRA's:

* `no_lift_when_empty`: nobody is lifted if no other adapter has requests waiting, so who idled while others ran
  without a queue has saved that up, and the bound does not hold.
* `popped_stay_listed`: a cancelled request that a pass met and that formed no batch has left its adapter's queue, but
  is listed as waiting for good. Without it a cancelled request leaves at once.

One bug is not kept: a request for the base model, or for an adapter that was not registered, ends the original's loop
with a KeyError and hangs the server; here it has weight 1, strict or not.

Cost: a pass O(adapters that wait) and O(log) of it per admission; a commit O(distinct running adapters). Neither grows
with the queue.
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from heapq import heapify, heappop, heapreplace
from math import lcm

from lorrery.scheduler.core.admission import AdmissionPass, Blocked
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.queues.base import prompts_within, steps_until_admissible
from lorrery.scheduler.core.queues.waiting import WaitingList
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence

INPUT_PRICE = 1
OUTPUT_PRICE = 2


class _Flow:
    """One adapter: its queue, its counter, and its place in the order of first sight."""

    def __init__(self, place: int, charge: int) -> None:
        self.waiting = WaitingList()
        self.counter = 0
        self.place = place
        self.charge = charge  # counter units per token at price 1

    def key(self) -> tuple[int, int]:
        """Return what decides whose turn it is."""
        return self.counter, self.place


class VtcFair:
    """Virtual token counters.

    Args:
        weights: adapter id to weight, positive; an adapter of weight 2 gets twice as much. Missing: 1.
        strict: keep S-LoRA's way with cancelled requests.
    """

    arrivals_read_state = True  # the lift compares counters

    def __init__(self, weights: Mapping[str, Fraction] | None = None, *, strict: bool = False) -> None:
        self.strict = strict
        self._weights = dict(weights or {})
        self.unit = lcm(*(weight.numerator for weight in self._weights.values()))
        """Counter units per token at price 1 and weight 1."""
        self._flows: dict[str | None, _Flow] = {}  # in order of first sight
        self._backlogged: dict[str | None, _Flow] = {}
        self._last_backlogged: _Flow | None = None
        self._listed = WaitingList()
        self._turn: tuple[_Flow, tuple[Sequence, Blocked]] | None = None

    def __len__(self) -> int:
        return len(self._listed)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._listed)

    def served(self) -> dict[str | None, Fraction]:
        """Return what each adapter was served, by weight; in order of first sight."""
        return {adapter_id: Fraction(flow.counter, self.unit) for adapter_id, flow in self._flows.items()}

    def append(self, sequence: Sequence, at_ps: int) -> None:
        """Let a sequence wait, and lift its adapter if it had none waiting."""
        self._listed.append(sequence)
        adapter_id = _adapter_id(sequence)
        flow = self._flows.get(adapter_id)
        if flow is None:
            weight = self._weights.get(adapter_id or "", Fraction(1))
            flow = self._flows[adapter_id] = _Flow(len(self._flows), int(self.unit / weight))
        if not len(flow.waiting):
            if self._backlogged:
                flow.counter = max(flow.counter, min(other.counter for other in self._backlogged.values()))
            elif self._last_backlogged is not None and not self.strict:
                flow.counter = max(flow.counter, self._last_backlogged.counter)
            self._backlogged[adapter_id] = flow
        flow.waiting.append(sequence)

    def cancel(self, handle: int) -> Sequence | None:
        """Remove and return a waiting sequence; in strict mode only mark and return it, the first time."""
        if self.strict:
            return self._listed.mark(handle)
        sequence = self._listed.pop(handle)
        if sequence is not None:
            self._unqueue(sequence)
        return sequence

    def clear(self) -> list[Sequence]:
        """Remove and return all that wait, in order of arrival; the counters stay."""
        for flow in self._backlogged.values():
            flow.waiting.clear()
        self._backlogged.clear()
        self._turn = None
        return self._listed.clear()

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Admit in order of counters, and charge the inputs."""
        self._turn = None
        cancelled: list[Sequence] = []
        for sequence in self._in_turn():
            if sequence.aborted:
                cancelled.append(sequence)
            elif not admission.admit(sequence):
                assert admission.refused is not None
                self._turn = self._flows[_adapter_id(sequence)], admission.refused
                break
        for sequence in admission.admitted:
            flow = self._flows[_adapter_id(sequence)]
            flow.counter += _input_charge(sequence, flow.charge)
        for sequence in (*admission.admitted, *cancelled):
            self._unqueue(sequence)
        if admission.admitted:
            self._listed.remove_all((*admission.admitted, *cancelled))
        return []

    def _in_turn(self) -> Iterator[Sequence]:
        """Yield waiting sequences in the order in which they would be served, as if each were charged its input."""
        turns = [(flow.counter, flow.place, iter(flow.waiting), flow.charge) for flow in self._backlogged.values()]
        heapify(turns)  # places differ, so the iterators are never compared
        while turns:
            counter, place, waiting, charge = turns[0]
            sequence = next(waiting, None)
            if sequence is None:
                heappop(turns)
                continue
            if not sequence.aborted:
                heapreplace(turns, (counter + _input_charge(sequence, charge), place, waiting, charge))
            yield sequence

    def _unqueue(self, sequence: Sequence) -> None:
        adapter_id = _adapter_id(sequence)
        flow = self._flows[adapter_id]
        if flow.waiting.pop(sequence.handle) is not None and not len(flow.waiting):
            self._last_backlogged = self._backlogged.pop(adapter_id)

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return when the one whose turn it is may fit, or when it will be another adapter's turn; exact.

        A running adapter's counter grows with every step, so another may come to have the smallest.
        """
        if self._turn is None or self._turn[1][1] is Blocked.COUNT:
            return limit
        turn, blocked = self._turn
        limit = steps_until_admissible(blocked, running, memory, limit)
        decoding = running.decoding_by_adapter()
        growth = OUTPUT_PRICE * decoding.get(_adapter_id(blocked[0]), 0) * turn.charge
        if not growth or limit == 1:
            return limit
        for adapter_id, flow in self._backlogged.items():
            gain = growth - OUTPUT_PRICE * decoding.get(adapter_id, 0) * flow.charge
            if gain > 0 and flow is not turn:
                lead = flow.counter - turn.counter + (flow.place > turn.place)
                limit = min(limit, max(1, -(-lead // gain)))
        return limit

    def wakes_at_ps(self, at_ps: int) -> int | None:
        """Return None: time alone changes nothing."""
        return None

    def at_rest(self) -> bool:
        """Tell whether nobody waits but cancelled ones that no pass will meet again."""
        return not self._backlogged

    def arrivals_matter(self) -> bool:
        """Tell that an arrival could enter: its adapter may have been served least."""
        return True

    def look_ahead(self, max_prompt_tokens: int) -> list[Sequence]:
        """Return who would be next in turn if only the prompt limit counted. The original has no look-ahead."""
        return prompts_within(self._in_turn(), max_prompt_tokens)

    def decoded(self, running: Running, num_steps: int) -> None:
        """Charge every decoding sequence's adapter for its tokens."""
        price = OUTPUT_PRICE * num_steps
        for adapter_id, num_decoding in running.decoding_by_adapter().items():
            flow = self._flows.get(adapter_id)
            if flow is not None:
                flow.counter += price * num_decoding * flow.charge


def _adapter_id(sequence: Sequence) -> str | None:
    """Return whose share it is: an adapter's versions have one together; None is the base model."""
    return None if sequence.adapter is None else sequence.adapter.adapter_id


def _input_charge(sequence: Sequence, charge: int) -> int:
    """Return what admission adds to the counter; who was in a batch before has been charged."""
    return 0 if sequence.num_requeues else INPUT_PRICE * sequence.input_tokens * charge
