"""Steps that compute one long prompt, chunk by chunk, in one run.

While a prompt takes all that is left of a step's token budget, its steps differ only in what is already cached. With c
tokens in each chunk after p others, and n decodes that hold K tokens, the longest of them l:

    step i = step_ps(a chunk of c tokens after p + i c; n decodes that hold K + i n tokens, the longest l + i)

No decision is needed between two of them. Attention over cached tokens has no closed sum (its tiles overlap by a power,
and are rounded), so each needed step is computed separately, and the times are those of single steps, to the
picosecond. A model that can do this with less than one call per step has `piece_ends_ps` (`steptime`).
"""

from bisect import bisect_left

from lorrery.worker.device.batch import Batch
from lorrery.worker.device.steptime import StepTimeModel
from lorrery.worker.device.work import PrefillWork


class ChunkRun:
    """The next steps of a run.

    Args:
        step_time: model of a step's duration; it does not read `Batch.decode_lengths`.
        work: the first chunk, which does not end its prompt.
        batch: the first step.
    """

    __slots__ = ("_batch", "_ends_ps", "_num_done", "_step_time", "_work")

    def __init__(self, step_time: StepTimeModel, work: PrefillWork, batch: Batch) -> None:
        self._step_time = step_time
        self._work = work
        self._batch = batch
        self._num_done = 0
        self._ends_ps: list[int] = []
        """End of each computed step, from the start of the first."""

    def extend(self, max_steps: int, duration_ps: int | None) -> tuple[int, int]:
        """Compute at most `max_steps` steps, to the first end at or after `duration_ps`; return number and time."""
        work, batch = self._work, self._batch
        piece_ends_ps = getattr(self._step_time, "piece_ends_ps", None)
        if piece_ends_ps is not None:
            self._ends_ps = piece_ends_ps(batch, max_steps, duration_ps)
            return len(self._ends_ps), self._ends_ps[-1]
        ends_ps = self._ends_ps
        num, kv_tokens, longest = batch.num_decodes, batch.decode_kv_tokens, batch.max_decode_kv_tokens
        new_tokens, past_tokens = work.new_tokens, work.past_tokens
        end_ps = step = 0
        while step < max_steps:
            piece = PrefillWork(work.handle, new_tokens, past_tokens + step * new_tokens, False)
            grown = step if num else 0
            end_ps += self._step_time.step_ps(Batch((piece,), num, kv_tokens + step * num, longest + grown, batch.lora))
            ends_ps.append(end_ps)
            step += 1
            if duration_ps is not None and end_ps >= duration_ps:
                break
        return step, end_ps

    @property
    def step_ps(self) -> int:
        """Duration of the next step."""
        return self.total_ps(1)

    def total_ps(self, num_steps: int) -> int:
        """Return the total duration of the next steps; they must have been computed."""
        return self._ends_ps[self._num_done + num_steps - 1] - self._done_ps

    def steps_to_cover(self, duration_ps: int, limit: int) -> int:
        """Return the fewest of the next steps, from 1 to `limit`, that take at least this long."""
        first = self._num_done
        return min(limit, bisect_left(self._ends_ps, self._done_ps + duration_ps, first, first + limit) - first + 1)

    @property
    def _done_ps(self) -> int:
        return self._ends_ps[self._num_done - 1] if self._num_done else 0

    def advance(self, num_steps: int) -> PrefillWork | None:
        """Move past steps; return the chunk of the next one, None if no further step is computed."""
        self._num_done += num_steps
        assert self._num_done <= len(self._ends_ps), "no more steps than are known"
        if self._num_done == len(self._ends_ps):
            return None
        work = self._work
        return PrefillWork(work.handle, work.new_tokens, work.past_tokens + self._num_done * work.new_tokens, False)
