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

The costs are those of the padded prefill, and what one adapter adds to it. `DeviceProfile` uses the device model.
`MeasuredProfile` looks up a table with S-LoRA's rules: padded lengths in steps of 32 up to 1024, even batch sizes; a
single prompt costs as two, an odd number as the mean of its neighbours, and anything not in the table is infinitely
expensive. An adapter of rank r adds, per layer and adapted projection (in, out), for n tokens (Punica, arXiv
2310.18547; S-LoRA, arXiv 2311.03285):

    max(2 n r (in + out) / (F e), (2 r (in + out) + 2 n (in + out + 2 r)) / (B e))      e: the kernels' shares

Cost of a pass: the programs, O(WINDOW^2) additions (some hundred microseconds); strict O(waiting^2).
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from math import inf
from operator import add
from typing import Protocol, TypeAlias, TypeVar

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.queues.base import ListedQueue, steps_until_admissible
from lorrery.scheduler.core.queues.waiting import MAX_OVERTAKES, Patience, adapter_key
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.catalogue.architecture import Model
from lorrery.worker.device.catalogue.hardware import SIXTEEN, Gpu
from lorrery.worker.device.steptime import StepTimeModel

_Key = TypeVar("_Key")

LENGTH_STEP = 32
"""Lengths are padded to a multiple of this."""
MAX_PROFILED_TOKENS = 1024
_MAX_ROWS = 1024
"""Lengths that are cached, of prefills and of adapters each; with a window of 64 each takes some kilobytes."""


class Profile(Protocol):
    """Costs of a prefill, in any one unit."""

    def prefill(self, num_sequences: int, tokens: int) -> float:
        """Return the cost of prefilling `num_sequences` prompts, each padded to `tokens`, without adapters."""
        ...

    def prefills(self, most: int, tokens: int) -> list[float]:
        """Return `prefill` of 0, 1, ... `most` prompts, and maybe of more. Derived classes need not define it."""
        return [self.prefill(num_sequences, tokens) for num_sequences in range(most + 1)]

    def adapter(self, rank: int, num_sequences: int, tokens: int) -> float:
        """Return what one adapter adds for this many prompts of that length."""
        ...

    def adapters(self, rank: int, most: int, tokens: int) -> list[float]:
        """Return `adapter` for 0, 1, ... `most` prompts, and maybe for more. Derived classes need not define it."""
        return [self.adapter(rank, num_sequences, tokens) for num_sequences in range(most + 1)]


class MeasuredProfile(Profile):
    """A table of measurements.

    Args:
        measured: (sequences, tokens, rank or 0) to seconds, even numbers and whole steps of length; None: not measured.
    """

    def __init__(self, measured: Callable[[int, int, int], float | None]) -> None:
        self._measured = measured

    def prefill(self, num_sequences: int, tokens: int) -> float:
        """Return the cost in seconds, or infinity."""
        return _look_up(lambda num, padded: self._measured(num, padded, 0), num_sequences, tokens)

    def adapter(self, rank: int, num_sequences: int, tokens: int) -> float:
        """Return what the adapter adds, in seconds, or infinity."""
        return _look_up(lambda num, padded: self._added(num, padded, rank), num_sequences, tokens) if rank else 0.0

    def _added(self, num_sequences: int, padded: int, rank: int) -> float | None:
        without, with_adapter = self._measured(num_sequences, padded, 0), self._measured(num_sequences, padded, rank)
        return None if without is None or with_adapter is None else with_adapter - without


def _look_up(table: Callable[[int, int], float | None], num_sequences: int, tokens: int) -> float:
    padded = _padded(tokens)
    if not num_sequences:
        return 0.0
    if padded > MAX_PROFILED_TOKENS:
        return inf
    if num_sequences == 1:
        num_sequences = 2
    if num_sequences % 2 == 0:
        cost = table(num_sequences, padded)
        return inf if cost is None else cost
    below, above = table(num_sequences - 1, padded), table(num_sequences + 1, padded)
    return inf if below is None or above is None else (below + above) / 2


class DeviceProfile(Profile):
    """Costs in picoseconds, as integers, by the device model.

    Args:
        step_time: of the device.
        gpu: its figures.
        model: the base model; adapters sit on its four attention projections.
        tensor_parallel: GPUs of a replica.
    """

    def __init__(self, step_time: StepTimeModel, gpu: Gpu, model: Model, tensor_parallel: int = 1) -> None:
        self._step_time = step_time
        gemm = gpu.fit.gemm_of(SIXTEEN)
        self._flops_ps = 1 / (gpu.tflops * gemm.flops * tensor_parallel)  # a TFLOPS is one per picosecond
        self._byte_ps = 1000 / (gpu.gb_per_second * gemm.bandwidth * tensor_parallel)
        self._layers = model.num_layers
        query, kv = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
        self._ends = tuple(model.hidden + other for other in (query, kv, kv, query))
        # The same sizes recur in pass after pass.
        self._prefills: dict[int, list[float]] = {}  # padded length: `prefill` of 0, 1, ... prompts
        self._adapters: dict[tuple[int, int], list[float]] = {}  # rank, length: `adapter` for 0, 1, ... prompts

    def prefill(self, num_sequences: int, tokens: int) -> float:
        """Return the duration of that step in picoseconds."""
        return self.prefills(num_sequences, tokens)[num_sequences]

    def prefills(self, most: int, tokens: int) -> list[float]:
        """Return `prefill` of 0, 1, ... `most` prompts, and maybe of more; cached."""
        padded = _padded(tokens)
        row = _row(self._prefills, padded)
        while len(row) <= most:
            row.append(self._compute_prefill_ps(len(row), padded))
        return row

    def _compute_prefill_ps(self, num_sequences: int, tokens: int) -> int:
        return self._step_time.step_ps(Batch((PrefillChunk(tokens, 0, samples=True),) * num_sequences))

    def adapter(self, rank: int, num_sequences: int, tokens: int) -> float:
        """Return how much longer the step takes, in picoseconds."""
        return self.adapters(rank, num_sequences, tokens)[num_sequences]

    def adapters(self, rank: int, most: int, tokens: int) -> list[float]:
        """Return `adapter` for 0, 1, ... `most` prompts, and maybe for more; cached."""
        row = _row(self._adapters, (rank, tokens))
        while len(row) <= most:
            row.append(self._compute_adapter_ps(rank, len(row) * tokens))
        return row

    def _compute_adapter_ps(self, rank: int, num_tokens: int) -> int:
        if not rank or not num_tokens:
            return 0
        per_layer = 0.0
        for ends in self._ends:
            arithmetic = 2 * num_tokens * rank * ends * self._flops_ps
            traffic = (2 * rank * ends + 2 * num_tokens * (ends + 2 * rank)) * self._byte_ps
            per_layer += max(arithmetic, traffic)
        return round(self._layers * per_layer)


def _row(rows: dict[_Key, list[float]], key: _Key) -> list[float]:
    row = rows.get(key)
    if row is None:
        if len(rows) >= _MAX_ROWS:
            rows.clear()
        row = rows[key] = [0]
    return row


def _padded(tokens: int) -> int:
    return -(-tokens // LENGTH_STEP) * LENGTH_STEP


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
