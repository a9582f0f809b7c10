"""The sequences of a batch that decode, as sums, and in the order in which they end.

A sequence stores what it had when it began to decode (`rows.Row`); one counter of decode steps gives the rest. With n
sequences, s steps, and o_i tokens in the cache of each less the counter then, the cache holds sum(o_i) + n s. So a step
of any batch changes one number.
"""

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

from lorrery.worker.device.rows import Row


class Decoding:
    """See the module.

    Attributes:
        num: how many decode.
        steps: decode steps that the batch has run.
    """

    def __init__(self) -> None:
        self.num = 0
        self.steps = 0
        self._kv_offset_sum = 0
        # A heap, which keeps rows that are gone until they come up; its top is not gone.
        self._by_last_step: list[tuple[int, int, Row]] = []
        self._kv_offsets: list[int] = []  # ascending

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache, of all of them."""
        return self._kv_offset_sum + self.num * self.steps

    @property
    def longest(self) -> int:
        """Tokens in the KV cache of the one that has most; there is one."""
        return self.steps + self._kv_offsets[-1]

    @property
    def steps_to_end(self) -> int:
        """How many steps until one ends, that one included; there is one."""
        return self._by_last_step[0][0] - self.steps + 1

    def add(self, row: Row) -> None:
        """Take in a row whose prefill has given its token; it decodes from the next step on."""
        row.begin_to_decode(self.steps)
        self.num += 1
        self._kv_offset_sum += row.kv_offset
        heappush(self._by_last_step, (row.last_step, row.order, row))
        insort(self._kv_offsets, row.kv_offset)

    def remove(self, row: Row) -> None:
        """Take out a row, which is gone; `drop_gone_top` comes before the next question."""
        self.num -= 1
        self._kv_offset_sum -= row.kv_offset
        del self._kv_offsets[bisect_left(self._kv_offsets, row.kv_offset)]

    def pop_finished(self) -> list[Row]:
        """Return the rows that have ended with the last step, in join order; they are still to be removed."""
        finished: list[Row] = []
        heap, steps = self._by_last_step, self.steps
        while heap and heap[0][0] < steps:
            row = heappop(heap)[2]
            if not row.gone:
                finished.append(row)
        return finished

    def drop_gone_top(self) -> None:
        """Let the top of the heap not be gone."""
        heap = self._by_last_step
        while heap and heap[0][2].gone:
            heappop(heap)

    def drop_gone(self) -> None:
        """Keep the heap from growing with sequences that left long before their end."""
        heap = self._by_last_step
        if len(heap) > 2 * self.num + 64:
            heap[:] = [entry for entry in heap if not entry[2].gone]
            heapify(heap)
