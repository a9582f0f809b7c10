"""Prefill costs for the `pets` queue: of the padded batch, and what one adapter adds to it.

`DeviceProfile` uses the device model. `MeasuredProfile` looks up a table with S-LoRA's rules: padded lengths in steps
of 32 up to 1024, even batch sizes; a single prompt costs as two, an odd number as the mean of its neighbours, and
anything not in the table is infinitely expensive.

An adapter of rank r adds, per layer and adapted projection (in, out), for n tokens (Punica, arXiv 2310.18547; S-LoRA,
arXiv 2311.03285):

    max(2 n r (in + out) / (F e), (2 r (in + out) + 2 n (in + out + 2 r)) / (B e))      e: the kernels' shares
"""

from collections.abc import Callable
from math import inf
from typing import Protocol, TypeVar

from lorrery.worker.device.architecture import Model
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.hardware import SIXTEEN, Gpu
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
