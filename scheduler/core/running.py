"""The sequences in the batch of one worker, with the aggregates that decisions need.

Every decoding sequence gets one token per decode step, so one counter (`decode_step`) stands for all lengths: a step
costs O(1) whatever the batch size. The arrays that admission rules read are rebuilt only when a sequence comes or goes.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from scheduler.core.sequence import Adapter, Sequence


class Running:
    """The batch: sequences in prefill, in order of admission, and decoding ones, in order of joining.

    Attributes:
        prefilling: by handle; what they need is reserved, but they have no token yet.
        held: by handle; they have ended, but keep what they hold until all have (static batching).
        decode_step: counts the decode steps of this batch.
        version: changes whenever a sequence comes, joins or goes.
        reserved_tokens: what all would hold in the end, if none left before; no peak is higher.
    """

    def __init__(self) -> None:
        self.prefilling: dict[int, Sequence] = {}
        self.decode_step = 0
        self._decoding: dict[int, Sequence] = {}
        self.held: dict[int, Sequence] = {}
        self._kv_tokens = 0
        self._finish_heap: list[tuple[int, int]] = []
        self._adapter_pins: dict[str, int] = {}
        self._adapter_slots = 0
        self.reserved_tokens = 0
        self.version = 0
        self._finish_steps: dict[int, int] = {}
        self._held_at_0: dict[int, int] = {}
        self._arrays: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return len(self._decoding) + len(self.prefilling) + len(self.held)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the decoding sequences."""
        return iter(self._decoding.values())

    @property
    def num_decoding(self) -> int:
        """Sequences past their prompt."""
        return len(self._decoding)

    def decoding_by_adapter(self) -> dict[str | None, int]:
        """Return how many sequences decode with each adapter; None: with the base model."""
        numbers: dict[str | None, int] = dict(self._adapter_pins.items())
        for sequence in (*self.prefilling.values(), *self.held.values()):
            if sequence.adapter is not None:
                numbers[sequence.adapter.adapter_id] -= 1
        with_base = len(self._decoding) - sum(numbers.values())
        if with_base:
            numbers[None] = with_base
        return numbers

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache, or reserved there: inputs, whole also while in prefill, and outputs.

        The newest token of a sequence enters the cache with its next step, and the last one never does.
        """
        return self._kv_tokens + (self.decode_step - 1) * len(self._decoding)

    @property
    def first(self) -> Sequence | None:
        """The sequence that has been in the batch for longest."""
        for sequences in (self._decoding, self.prefilling, self.held):
            for sequence in sequences.values():
                return sequence
        return None

    def get(self, handle: int) -> Sequence | None:
        """Return the sequence of that handle."""
        return self._decoding.get(handle) or self.prefilling.get(handle) or self.held.get(handle)

    # --- adapters ---------------------------------------------------------------------------------------------------

    @property
    def adapter_ids(self) -> frozenset[str]:
        """Distinct adapters of the sequences."""
        return frozenset(self._adapter_pins)

    @property
    def adapter_pins(self) -> int:
        """Sequences that use an adapter."""
        return sum(tuple(self._adapter_pins.values()))

    @property
    def adapter_slots(self) -> int:
        """Pool slots of the distinct adapters."""
        return self._adapter_slots

    def uses(self, adapter_id: str) -> bool:
        """Tell whether a sequence has this adapter."""
        return adapter_id in self._adapter_pins

    def adapter_slots_with(self, adapter: Adapter | None) -> int:
        """Return `adapter_slots` as it would be if a sequence with this adapter ran too."""
        if adapter is None or adapter.adapter_id in self._adapter_pins:
            return self._adapter_slots
        return self._adapter_slots + adapter.slots

    def _pin(self, adapter: Adapter | None) -> None:
        if adapter is None:
            return
        pins = self._adapter_pins.get(adapter.adapter_id, 0)
        self._adapter_pins[adapter.adapter_id] = pins + 1
        if not pins:
            self._adapter_slots += adapter.slots

    def _unpin(self, adapter: Adapter | None) -> None:
        if adapter is None:
            return
        pins = self._adapter_pins[adapter.adapter_id] - 1
        if pins:
            self._adapter_pins[adapter.adapter_id] = pins
        else:
            del self._adapter_pins[adapter.adapter_id]
            self._adapter_slots -= adapter.slots

    def _changed(self) -> None:
        self._arrays = None
        self.version += 1

    # --- coming and going -------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        """Take a sequence in; its prefill begins."""
        self.prefilling[sequence.handle] = sequence
        self._enter(sequence)

    def join(self, sequence: Sequence) -> None:
        """Let a sequence decode that has just got the token of its prefill."""
        if self.prefilling.pop(sequence.handle, None) is None:
            self._enter(sequence)
        sequence.base_step = self.decode_step - 1
        self._kv_tokens -= sequence.base_step
        self._decoding[sequence.handle] = sequence
        self._finish_steps[sequence.handle] = finish_step = sequence.finish_step
        self._held_at_0[sequence.handle] = sequence.input_tokens - sequence.base_step
        heappush(self._finish_heap, (finish_step, sequence.handle))
        self._changed()

    def _enter(self, sequence: Sequence) -> None:
        self._kv_tokens += sequence.input_tokens
        self.reserved_tokens += sequence.input_tokens + sequence.budget_tokens - 1
        self._pin(sequence.adapter)
        self._changed()

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence and all it holds."""
        if self._decoding.pop(sequence.handle, None) is not None:
            self._kv_tokens += sequence.base_step
            del self._finish_steps[sequence.handle], self._held_at_0[sequence.handle]
        elif self.held.pop(sequence.handle, None) is not None:
            self._kv_tokens -= sequence.held_output_tokens - 1
        else:
            del self.prefilling[sequence.handle]
        self._kv_tokens -= sequence.input_tokens
        self.reserved_tokens -= sequence.input_tokens + sequence.budget_tokens - 1
        self._unpin(sequence.adapter)
        self._changed()

    def hold(self, sequence: Sequence) -> None:
        """Let a decoding sequence that has ended keep what it holds, and grow no more."""
        del self._decoding[sequence.handle], self._finish_steps[sequence.handle], self._held_at_0[sequence.handle]
        sequence.held_output_tokens = sequence.output_tokens_at(self.decode_step)
        self._kv_tokens += sequence.base_step + sequence.held_output_tokens - 1
        self.held[sequence.handle] = sequence
        self._changed()

    def advance(self, num_steps: int) -> None:
        """Let every decoding sequence get `num_steps` tokens."""
        self.decode_step += num_steps

    def steps_to_length(self) -> int:
        """Return the decode steps until the first sequence has used up its budget; 1 if none decodes."""
        heap = self._finish_heap
        while heap:
            finish_step, handle = heap[0]
            sequence = self._decoding.get(handle)
            if sequence is not None and sequence.finish_step == finish_step:
                return max(1, finish_step - self.decode_step)
            heappop(heap)
        return 1

    def steps_to_last_length(self) -> int:
        """Return the decode steps until the last sequence has used up its budget; 1 if none decodes."""
        last_step = max((sequence.finish_step for sequence in self), default=0)
        return max(1, last_step - self.decode_step)

    def reservations(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what the peak test needs: (tokens left after the next one, tokens held).

        Shape (len(self),) each, int64, sorted by tokens left, descending. A sequence in prefill counts as if it had its
        first token.
        """
        step = self.decode_step
        if self._arrays is None:
            finishes = np.fromiter(self._finish_steps.values(), np.int64, len(self._finish_steps))
            helds = np.fromiter(self._held_at_0.values(), np.int64, len(self._held_at_0))
            if self.prefilling:
                newcomers = self.prefilling.values()
                finishes = np.append(finishes, [step - 1 + sequence.budget_tokens for sequence in newcomers])
                helds = np.append(helds, [sequence.input_tokens + 1 - step for sequence in newcomers])
            order = np.argsort(-finishes, kind="stable")
            self._arrays = finishes[order], helds[order]
        finishes, helds = self._arrays
        if self.prefilling:
            self._arrays = None  # these do not move with the decode steps, so the arrays are good for now only
        return finishes - (step + 1), helds + step
