"""Batches of similar lengths, cut by a cost profile: two dynamic programs.

S-LoRA's `pets` (slora/server/router/pets_req_queue.py, commit c1ddf48), after PetS (Zhou et al., USENIX ATC 2022). If
more than `MIN_WAITING` requests wait:

1. Each adapter's requests are sorted by prompt length and cut into chunks, so that the sum of what the adapter adds to
   each chunk, padded to its longest prompt, is least.
2. The chunks are sorted by their longest prompt and cut into macro batches, so that the sum of the padded prefills is
   least. The first macro batch, which has the shortest prompts, is walked up to the first refusal.

Otherwise first come first served.

`strict` keeps the original's:

* `no_bound`: long prompts starve while short ones arrive. By default at most `MAX_OVERTAKES` sequences overtake the one
  that has waited longest, and it is first come first served until that one has entered.
* `whole_queue`: the programs, quadratic in their input, take the whole queue. The default takes the `WINDOW` requests
  that have waited longest.
* `table`: costs come from a table of even batch sizes and at most 1024 tokens; a longer prompt stopped the original by
  an assertion (here its cost is infinite, as of everything not in the table). The default uses the device model.
* `cancelled_stay_listed`: a cancelled request takes part in the programs, and is listed until a batch forms.

Cost of a pass: the programs, O(WINDOW^2) additions (some hundred microseconds); strict O(waiting^2).
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from math import inf
from operator import add
from typing import TypeAlias, TypeVar

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.queues.base import ListedQueue, steps_until_admissible
from lorrery.scheduler.core.queues.by_adapter import adapter_key
from lorrery.scheduler.core.queues.patience import MAX_OVERTAKES, Patience
from lorrery.scheduler.core.queues.profile import Profile
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence

MIN_WAITING = 10
"""Up to this many waiting requests it is first come first served (S-LoRA's comment says 20)."""
WINDOW = 64

Costs: TypeAlias = list[float]
_Item = TypeVar("_Item")


class Pets(ListedQueue):
    """PetS's coordinated batching.

    Args:
        profile: costs of prefills.
        strict: keep S-LoRA's bugs.
        max_overtakes: how many sequences may overtake the one that has waited longest.
    """

    def __init__(self, profile: Profile, *, strict: bool = False, max_overtakes: int = MAX_OVERTAKES) -> None:
        super().__init__(strict=strict)
        self._profile = profile
        self._patience = Patience(max_overtakes)
        # The last input of the programs and their result: a pass that admits nothing is followed by one with the same.
        self._window: list[Sequence] = []
        self._input_tokens: list[int] = []
        self._macro_batch: list[Sequence] = []

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Try the first macro batch."""
        self._blocked = None
        head = self._waiting.first
        if head is None:
            return []
        left = len(self) if self.strict else self._patience.left(head)
        met: list[Sequence] = []
        for sequence in self._first_macro_batch() if left and len(self) > MIN_WAITING else list(self._waiting):
            if sequence.aborted:
                met.append(sequence)
                continue
            if not left and sequence is not head and head not in admission.admitted:
                break
            if not admission.admit(sequence):
                self._blocked = admission.refused
                break
            left -= left > 0
        if admission.admitted:
            self._patience.note(head, admission.admitted)
            self._waiting.remove_all((*admission.admitted, *met))
        return []

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return after how many decode steps the sequence that ended the pass may fit."""
        return steps_until_admissible(self._blocked, running, memory, limit)

    def _first_macro_batch(self) -> list[Sequence]:
        window = list(self._waiting) if self.strict else self._waiting.front(WINDOW)
        input_tokens = [sequence.input_tokens for sequence in window]
        if window != self._window or input_tokens != self._input_tokens:
            self._window, self._input_tokens = window, input_tokens
            self._macro_batch = self._cut_first(window)
        return self._macro_batch

    def _cut_first(self, window: list[Sequence]) -> list[Sequence]:
        chunks: list[list[Sequence]] = []
        for of_adapter in _by_adapter(window):
            of_adapter.sort(key=lambda sequence: sequence.input_tokens)
            chunks += _cut(of_adapter, partial(self._chunk_costs, of_adapter))
        chunks.sort(key=lambda chunk: chunk[-1].input_tokens)
        num_before = list(accumulate(map(len, chunks), initial=0))
        first = _cut(chunks, partial(self._macro_batch_costs, chunks, num_before))[0]
        return [sequence for chunk in first for sequence in chunk]

    def _chunk_costs(self, sequences: list[Sequence], end: int) -> Costs:
        """Return the costs of the chunks of one adapter that end at `end`, the longest prompt last."""
        adapter, tokens = sequences[end - 1].adapter, sequences[end - 1].input_tokens
        return self._profile.adapters(0 if adapter is None else adapter.rank, end, tokens)[end:0:-1]

    def _macro_batch_costs(self, chunks: list[list[Sequence]], num_before: list[int], end: int) -> Costs:
        """Return the costs of the macro batches that end at `end`, given the number of sequences before each chunk."""
        num_sequences = num_before[end]
        costs = self._profile.prefills(num_sequences, chunks[end - 1][-1].input_tokens)
        return [costs[num_sequences - before] for before in num_before[:end]]


def _by_adapter(window: list[Sequence]) -> list[list[Sequence]]:
    by_adapter: dict[str | None, list[Sequence]] = {}
    for sequence in window:
        by_adapter.setdefault(adapter_key(sequence), []).append(sequence)
    return list(by_adapter.values())


def _cut(what: list[_Item], costs_to: Callable[[int], Costs]) -> list[list[_Item]]:
    """Cut a list into pieces with the least sum of costs; ties: the longest last piece.

    Args:
        what: at least one element.
        costs_to: for an end, the cost of each piece that ends there: entry i is that of `what[i:end]`.
    """
    if len(what) == 1:
        return [what]
    least: Costs = [0]
    begins: list[int] = []
    for end in range(1, len(what) + 1):
        sums = list(map(add, least, costs_to(end)))
        best = min(sums)
        least.append(best)
        begins.append(sums.index(best) if best < inf else 0)
    pieces: list[list[_Item]] = []
    end = len(what)
    while end:
        pieces.append(what[begins[end - 1] : end])
        end = begins[end - 1]
    return pieces[::-1]
