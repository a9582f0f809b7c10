"""The sequences that decode on one worker, with the aggregates that decisions need.

Every running sequence gets one token per decode step, so one counter (`decode_step`) stands for all lengths: a step
costs O(1) whatever the batch size. The arrays that admission rules read are rebuilt only when a sequence joins or
leaves.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from scheduler.core.sequence import Adapter, Sequence


class Running:
    """The running batch, in batch order (the order of joining)."""

    def __init__(self) -> None:
        self.decode_step = 0
        self.kv_tokens = 0
        """Tokens that the running sequences hold, inputs and outputs."""
        self._sequences: dict[int, Sequence] = {}
        self._finish_heap: list[tuple[int, int]] = []
        self._adapter_pins: dict[str, int] = {}
        self._adapter_slots = 0
        self._arrays: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __contains__(self, handle: int) -> bool:
        return handle in self._sequences

    def get(self, handle: int) -> Sequence | None:
        """Return the running sequence of that handle."""
        return self._sequences.get(handle)

    @property
    def adapter_ids(self) -> frozenset[str]:
        """Distinct adapters of the running sequences."""
        return frozenset(self._adapter_pins)

    @property
    def adapter_slots(self) -> int:
        """Pool slots of the distinct running adapters by S-LoRA's rule: 4 x rank each."""
        return self._adapter_slots

    def uses(self, adapter_id: str) -> bool:
        """Tell whether a running sequence has this adapter."""
        return adapter_id in self._adapter_pins

    def adapter_slots_with(self, adapter: Adapter | None) -> int:
        """Return `adapter_slots` as it would be if a sequence with this adapter ran too."""
        if adapter is None or adapter.adapter_id in self._adapter_pins:
            return self._adapter_slots
        return self._adapter_slots + 4 * adapter.rank

    def join(self, sequence: Sequence) -> None:
        """Add a sequence that has just got the token of its prefill."""
        sequence.base_step = self.decode_step - 1
        self._sequences[sequence.handle] = sequence
        self.kv_tokens += sequence.input_tokens + 1
        heappush(self._finish_heap, (sequence.finish_step, sequence.handle))
        if sequence.adapter is not None:
            adapter_id, rank = sequence.adapter
            pins = self._adapter_pins.get(adapter_id, 0)
            self._adapter_pins[adapter_id] = pins + 1
            if not pins:
                self._adapter_slots += 4 * rank
        self._arrays = None

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence and all it holds."""
        del self._sequences[sequence.handle]
        self.kv_tokens -= sequence.input_tokens + sequence.output_tokens(self.decode_step)
        if sequence.adapter is not None:
            adapter_id, rank = sequence.adapter
            pins = self._adapter_pins[adapter_id] - 1
            if pins:
                self._adapter_pins[adapter_id] = pins
            else:
                del self._adapter_pins[adapter_id]
                self._adapter_slots -= 4 * rank
        self._arrays = None

    def advance(self, num_steps: int) -> None:
        """Let every sequence decode `num_steps` tokens."""
        self.decode_step += num_steps
        self.kv_tokens += num_steps * len(self._sequences)

    def steps_to_length(self) -> int:
        """Return the decode steps until the first sequence has used up its budget; 1 if none runs."""
        heap = self._finish_heap
        while heap:
            finish_step, handle = heap[0]
            sequence = self._sequences.get(handle)
            if sequence is not None and sequence.finish_step == finish_step:
                return finish_step - self.decode_step
            heappop(heap)
        return 1

    def reservations(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what S-LoRA's peak test needs: (tokens left after the next one, tokens held).

        Shape (len(self),) each, int64, sorted by tokens left, descending.
        """
        if self._arrays is None:
            finish = np.fromiter((s.finish_step for s in self), np.int64, len(self))
            held_at_0 = np.fromiter((s.input_tokens - s.base_step for s in self), np.int64, len(self))
            order = np.argsort(-finish, kind="stable")
            self._arrays = finish[order], held_at_0[order]
        finish, held_at_0 = self._arrays
        return finish - (self.decode_step + 1), held_at_0 + self.decode_step
