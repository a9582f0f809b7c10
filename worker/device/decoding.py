"""The decoding sequences of a batch, as sums, and in the order in which they end.

A sequence stores its values at the start of its decoding (`rows.Row`); one counter of decode steps gives the current
ones. With n sequences, s steps, and o_i cached tokens of each less the counter at its start, the cache holds
sum(o_i) + n s. So a step of any batch changes one number.
"""

from typing import TYPE_CHECKING

from lorrery.vocabulary.machine_ints import bisect_left, insort
from lorrery.worker.device.rows import Row

if TYPE_CHECKING:
    from mypy_extensions import i64


class Decoding:
    """See the module.

    Attributes:
        num: number of decoding sequences.
        steps: decode steps that the batch has run.
    """

    def __init__(self) -> None:
        self.num = 0
        self.steps = 0
        self._kv_offset_sum = 0
        self._kv_offsets: list[i64] = []  # ascending
        self._last_steps: list[i64] = []  # distinct, ascending
        self._ending: dict[int, list[Row]] = {}  # by last step

    @property
    def kv_tokens(self) -> int:
        """Total tokens in the KV cache."""
        return self._kv_offset_sum + self.num * self.steps

    @property
    def longest(self) -> int:
        """KV tokens of the longest sequence; there must be one."""
        return self.steps + self._kv_offsets[-1]

    @property
    def steps_to_end(self) -> int:
        """Steps until a sequence ends, that step included; there must be one."""
        return self._last_steps[0] - self.steps + 1

    def add(self, row: Row) -> None:
        """Add a row whose prefill has given its token; it decodes from the next step on."""
        row.begin_to_decode(self.steps)
        self.num += 1
        self._kv_offset_sum += row.kv_offset
        insort(self._kv_offsets, row.kv_offset)
        others = self._ending.get(row.last_step)
        if others is None:
            insort(self._last_steps, row.last_step)
            self._ending[row.last_step] = [row]
        else:
            others.append(row)

    def remove(self, row: Row) -> None:
        """Remove a row."""
        self.num -= 1
        self._kv_offset_sum -= row.kv_offset
        del self._kv_offsets[bisect_left(self._kv_offsets, row.kv_offset)]
        rows = self._ending[row.last_step]
        if len(rows) > 1:
            rows.remove(row)
        else:
            del self._ending[row.last_step]
            del self._last_steps[bisect_left(self._last_steps, row.last_step)]

    def finished(self) -> list[Row]:
        """Return the rows that ended with the last step, in join order; the caller removes them."""
        if not self.num or self._last_steps[0] >= self.steps:
            return []
        rows = self._ending[self._last_steps[0]].copy()
        if len(rows) > 1:
            rows.sort(key=_order)
        return rows


def _order(row: Row) -> int:
    return row.order
