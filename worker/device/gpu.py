"""The batch on the mock GPU: its sequences, their progress, the duration of a step and its tokens.

Positions. A sequence has p prompt tokens and, if it was resumed, r tokens produced elsewhere. Its prefill computes
p + r tokens and gives output token number r (from 0). After that, with j tokens of output, the cache holds
p + j - 1: the newest token is the next decode's input, enters the cache in that step, and the step gives token j.

Live, `advance` runs one step and makes its tokens; simulated, `jump` runs many without. The law: `jump(k)` leaves the
same state as `jump(j)` then `jump(k - j)`, and as k times `advance`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.machine_ints import product
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.batch import Batch, PrefillWork, StepCost, StepOutcome, steps_to_cover
from lorrery.worker.device.decoding import ChunkRun, Decoding, DecodingAdapters, KnownEnds, chunk_run
from lorrery.worker.device.output import TokenIds
from lorrery.worker.device.rows import DecodeRows, DeviceSequence, Row, tokens_of_step
from lorrery.worker.device.steptime import StepTimeModel

MOST_UNEVEN_STEPS: Final = 32
"""Most steps without a closed form in one run: they are computed ahead, and in vain if something interrupts them."""


class MockGpu:
    """Runs steps without a clock: the caller sets their start, the step-time model their duration.

    Args:
        step_time: model of a step's duration.
        spelling: id of each of our tokens in the vocabulary in use; None: unchanged.
    """

    def __init__(self, step_time: StepTimeModel, spelling: TokenIds | None = None) -> None:
        self._prefill_ps: int | None = None  # duration of the next step with prefills, once computed
        self._uneven: KnownEnds | None = None  # the next decode steps, if they have no closed form and several run
        self.use(step_time)
        self._spelling = spelling
        self._rows: dict[int, Row] = {}  # in join order
        self._num_joined = 0
        self._decoding = Decoding()
        self._adapters = DecodingAdapters()
        self._partial_tokens = 0
        # Sequences that have ended and keep their place (static batching), with their KV tokens.
        self._hold = False
        self._held: dict[int, tuple[DeviceSequence, int]] = {}
        self._decode_rows: DecodeRows | None = None
        # The next decode steps, if they have a closed form: duration of the first, and increase per further step.
        self._closed = False
        self._next_ps = self._slope_ps = 0
        self._steps_alike = NEVER  # how many of them have it
        self._prefills: tuple[PrefillWork, ...] = ()
        self._chunk_run: ChunkRun | None = None  # of the prompt whose chunk is the only one in `_prefills`
        self._decode = False

    def __contains__(self, handle: int) -> bool:
        return handle in self._rows or handle in self._held

    def __len__(self) -> int:
        return len(self._rows) + len(self._held)

    @property
    def num_unended(self) -> int:
        """Sequences in the batch that have not ended."""
        return len(self._rows)

    @property
    def num_decoding(self) -> int:
        """Sequences past their prompt that have not ended."""
        return self._decoding.num

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache, of all sequences."""
        kv_tokens = self._partial_tokens + self._decoding.kv_tokens
        return kv_tokens + sum([held for _, held in self._held.values()]) if self._held else kv_tokens

    @property
    def is_uneven(self) -> bool:
        """Whether the next steps that `run` has returned form no straight line, though they have no prefills."""
        return self._uneven is not None

    def join(self, sequence: DeviceSequence) -> None:
        """Add a sequence to the end of the batch; it waits for its prefill.

        Raises:
            ValueError: the handle is in the batch.
        """
        if sequence.handle in self:
            raise ValueError(f"sequence {sequence.handle} is in the batch already")
        self._rows[sequence.handle] = Row(sequence, self._num_joined)
        self._num_joined += 1

    def leave(self, handle: int) -> None:
        """Remove a sequence that has not ended by itself, or was held.

        Raises:
            ValueError: the handle is not in the batch.
        """
        self._known, self._prefill_ps, self._uneven = False, None, None
        held = self._held.pop(handle, None) if self._held else None
        if held is not None:
            self._adapters.remove(held[0])
            return
        self._remove(self._row(handle))
        if self._prefills:
            self._prefills = tuple(work for work in self._prefills if work.handle != handle)
            self._chunk_run = None

    def clear(self) -> None:
        """Remove every sequence."""
        for row in tuple(self._rows.values()):
            self._remove(row)
        for handle in tuple(self._held):
            self.leave(handle)
        self._prefills, self._chunk_run, self._decode = (), None, False

    def begin(self, prefills: Iterable[PrefillWork], *, decode: bool, hold: bool = False) -> None:
        """Set the work of the next steps: the first runs the prefills, all of them (with `decode`) decode one token.

        Every sequence that is past its prompt when a step begins decodes in it. With `hold` a sequence that ends keeps
        its place, its KV tokens and its share of every step, until `leave` (static batching).

        Raises:
            ValueError: two chunks of one sequence; or a chunk of a sequence that is not in the batch or past its
                prompt, that does not continue the sequence's earlier chunks, or whose `samples` is not whether it
                ends the prompt.
        """
        prefills = tuple(prefills)
        if decode != self._decode or hold != self._hold:
            self._known = False
        self._prefills, self._decode, self._hold, self._prefill_ps = (), decode, hold, None
        self._chunk_run = self._uneven = None
        if not prefills:
            return
        if len(prefills) > 1 and len({work.handle for work in prefills}) < len(prefills):
            raise ValueError("two chunks of one sequence in one step")
        for work in prefills:
            self._row(work.handle).check(work)
        self._prefills = prefills

    def batch(self) -> Batch:
        """Return the next step's work."""
        decoding = self._decoding
        decode = self._decode and decoding.num > 0
        if not self._prefills:
            if not decode:
                return Batch()
            if not self._held:
                return Batch((), decoding.num, decoding.kv_tokens, decoding.longest, self._adapters.work)
            num, kv_tokens, longest = self._decode_sums()
            return Batch((), num, kv_tokens, longest, self._adapters.work)
        prefills = [(self._rows[work.handle].sequence, work.new_tokens) for work in self._prefills]
        lora = self._adapters.work_with(prefills, decode=decode)
        if not decode:
            return Batch(self._prefills, lora=lora)
        num, kv_tokens, longest = self._decode_sums()
        if not self._reads_lengths:
            return Batch(self._prefills, num, kv_tokens, longest, lora)
        steps = decoding.steps
        lengths = [row.kv_offset + steps for row in self._rows.values() if row.decoding]
        lengths += (kv_tokens for _, kv_tokens in self._held.values())
        return Batch(self._prefills, num, kv_tokens, longest, lora, tuple(lengths))

    def step_ps(self) -> int:
        """Return the duration of the next step."""
        if self._uneven is not None:
            return self._uneven.step_ps
        if not self._prefills:
            return self._next_ps if self._closed_ahead() else self._step_time.step_ps(self.batch())
        if self._chunk_run is not None:
            return self._chunk_run.step_ps
        if self._prefill_ps is None:
            self._prefill_ps = self._step_time.step_ps(self.batch())
        return self._prefill_ps

    def step_cost(self, batch: Batch) -> StepCost:
        """Return the parts of a step's duration, for the work in `batch`."""
        return self._step_time.step_cost(batch)

    def run(self, max_steps: int, duration_ps: int | None = None, chunk_steps: int = 1) -> tuple[int, int]:
        """Return how many of the next steps may run in one jump, and their total duration.

        They run until a sequence ends or a bound is reached.

        Args:
            max_steps: most steps, at least 1.
            duration_ps: stop at the first end of a step at least this long after the start; None: no such bound.
            chunk_steps: most steps over which the prompt of the first step's chunk continues.
        """
        if chunk_steps > 1 and not self._reads_lengths and not self._held:
            return self._run_chunks(chunk_steps, duration_ps)
        if max_steps == 1 or self._prefills:
            return 1, self.step_ps()
        if not (self._closed if self._known else self._closed_ahead()):
            return self._run_uneven(max_steps, duration_ps)
        if self._decode and self._decoding.num:
            steps_to_end = self._decoding.steps_to_end
            if steps_to_end < max_steps:
                max_steps = steps_to_end
            if self._steps_alike < max_steps:
                max_steps = self._steps_alike
        total_ps = product(max_steps, self._next_ps) + product(self._slope_ps, max_steps * (max_steps - 1) // 2)
        if duration_ps is None or max_steps == 1 or total_ps <= duration_ps:
            return max_steps, total_ps
        steps = self.steps_to_cover(duration_ps, max_steps)
        return steps, self.total_ps(steps)

    def _run_chunks(self, max_steps: int, duration_ps: int | None) -> tuple[int, int]:
        (work,), batch = self._prefills, self.batch()
        if batch.num_decodes:
            max_steps = min(max_steps, self._decoding.steps_to_end)
        self._chunk_run, num_steps, total_ps = chunk_run(self._step_time, work, batch, max_steps, duration_ps)
        return num_steps, total_ps

    def _run_uneven(self, max_steps: int, duration_ps: int | None) -> tuple[int, int]:
        """Compute the next decode steps one by one: no decision is needed between them."""
        if not (self._decode and self._decoding.num):
            return 1, self.step_ps()
        batch, growing, longest = self.batch(), self._decoding.num, self._decoding.longest
        ends_ps: list[int] = []
        end_ps = 0
        for step in range(min(max_steps, self._decoding.steps_to_end, MOST_UNEVEN_STEPS)):
            kv_tokens = batch.decode_kv_tokens + step * growing
            most = max(batch.max_decode_kv_tokens, longest + step)
            end_ps += self._step_time.step_ps(Batch((), batch.num_decodes, kv_tokens, most, batch.lora))
            ends_ps.append(end_ps)
            if duration_ps is not None and end_ps >= duration_ps:
                break
        self._uneven = KnownEnds(ends_ps)
        return len(ends_ps), end_ps

    def use(self, step_time: StepTimeModel) -> None:
        """Use another model for steps that have not begun."""
        self._step_time, self._known, self._prefill_ps, self._uneven = step_time, False, None, None
        # A loop over the batch in each step with prompts, so only for models that need it.
        self._reads_lengths = bool(getattr(step_time, "reads_decode_lengths", True))
        self._saw_kv_tokens: Callable[[int], None] | None = getattr(step_time, "saw_kv_tokens", None)

    def total_ps(self, num_steps: int) -> int:
        """Return the total duration of the next steps; for more than one, only as allowed by `run`."""
        if num_steps == 1:
            return self.step_ps()
        if self._chunk_run is not None:
            return self._chunk_run.total_ps(num_steps)
        if self._uneven is not None:
            return self._uneven.total_ps(num_steps)
        assert self._known and self._closed  # noqa: PT018  one question
        return product(num_steps, self._next_ps) + product(self._slope_ps, num_steps * (num_steps - 1) // 2)

    def steps_to_cover(self, duration_ps: int, limit: int) -> int:
        """Return the fewest steps, from 1 to `limit`, that take at least this long. In closed form."""
        if self._chunk_run is not None:
            return self._chunk_run.steps_to_cover(duration_ps, limit)
        if self._uneven is not None:
            return self._uneven.steps_to_cover(duration_ps, limit)
        assert self._known and self._closed  # noqa: PT018  one question
        return steps_to_cover(self._next_ps, self._slope_ps, duration_ps, limit)

    def advance(self) -> StepOutcome:
        """Run one step; sequences that end leave the batch."""
        prefilled = self._run_prefills() if self._prefills else []
        handles, tokens, orders = self._decode_tokens()
        finished = self._finish_decodes()
        if finished or prefilled:
            handles, tokens = tokens_of_step(handles, tokens, orders, finished, prefilled, self._spelling)
        if prefilled:
            finished += self._admit_to_decode(prefilled)
            finished.sort(key=_order)
        return StepOutcome(handles, tokens, _ends(finished) if finished else ())

    def jump(self, num_steps: int) -> tuple[tuple[int, FinishReason], ...]:
        """Run steps without making their tokens; return the sequences that end with the last of them.

        Args:
            num_steps: at least 1; sequences may end only with the last of them.

        Raises:
            ValueError: `num_steps` is out of range: more than one with prefills, or beyond a sequence's end.
        """
        if self._chunk_run is not None:
            return self._jump_chunks(self._chunk_run, num_steps)
        if num_steps < 1 or (self._prefills and num_steps > 1):
            raise ValueError(f"cannot run {num_steps} steps{'; the first has prefills' if num_steps > 0 else ''}")
        if self._prefills:
            past_prompt = self._run_prefills()
            finished = self._finish_decodes() if self._decode else []
            if past_prompt:
                finished += self._admit_to_decode(past_prompt)
                finished.sort(key=_order)
            return _ends(finished) if finished else ()
        if not (self._decode and self._decoding.num):
            return ()
        limit = self._decoding.steps_to_end
        if num_steps > limit:
            raise ValueError(f"cannot run {num_steps} steps; a sequence ends after {limit}")
        self._count_decode_steps(num_steps)
        return _ends(self._pop_finished()) if num_steps == limit else ()

    def _jump_chunks(self, run: ChunkRun, num_steps: int) -> tuple[tuple[int, FinishReason], ...]:
        (work,) = self._prefills
        row = self._rows[work.handle]
        computed = work.past_tokens + num_steps * work.new_tokens
        self._partial_tokens += computed - row.cached_tokens
        row.cached_tokens = computed
        if run.advance(num_steps):
            self._prefills = (run.next_work,)
        else:
            self._prefills, self._chunk_run = (), None
        self._count_decode_steps(num_steps)
        return _ends(self._pop_finished()) if self._decode else ()

    def _row(self, handle: int) -> Row:
        if handle not in self._rows:
            raise ValueError(f"sequence {handle} is not in the batch")
        return self._rows[handle]

    def _remove(self, row: Row) -> None:
        del self._rows[row.sequence.handle]
        if row.decoding:
            self._decoding.remove(row)
            self._adapters.remove(row.sequence)
            self._decode_rows, self._known = None, False
        else:
            self._partial_tokens -= row.cached_tokens

    def _end(self, row: Row, kv_tokens: int) -> None:
        self._remove(row)
        if self._hold:
            self._held[row.sequence.handle] = row.sequence, kv_tokens
            self._adapters.add(row.sequence)

    def _decode_sums(self) -> tuple[int, int, int]:
        """Return the number of decodes in a step, their total KV tokens, and the longest; held sequences included."""
        decoding = self._decoding
        num, total, longest = decoding.num, decoding.kv_tokens, decoding.longest
        for _, kv_tokens in self._held.values():
            num, total, longest = num + 1, total + kv_tokens, max(longest, kv_tokens)
        return num, total, longest

    def _closed_ahead(self) -> bool:
        """Return whether the next decode steps have a closed form; compute it if not known."""
        if self._known:
            return self._closed
        self._known = True
        decoding, steps_alike = self._decoding, NEVER
        if self._held:
            segment = None
            if self._decode and decoding.num:
                num, kv_tokens, longest = self._decode_sums()
                grows = longest == decoding.longest
                if not grows:  # the longest stays the same until another one, which grows, is as long
                    steps_alike = longest - decoding.longest
                segment = self._step_time.decode_segment(
                    num,
                    kv_tokens,
                    longest,
                    self._adapters.work,
                    num_held=num - decoding.num,
                    longest_grows=grows,
                )
        elif self._decode and decoding.num:
            segment = self._step_time.decode_segment(
                decoding.num, decoding.kv_tokens, decoding.longest, self._adapters.work
            )
        else:
            segment = self._step_time.decode_segment(0, 0, 0)
        self._closed = segment is not None
        if segment is not None:
            self._next_ps, self._slope_ps = segment.base_ps, segment.slope_ps
            self._steps_alike = min(steps_alike, segment.num_steps)
        return self._closed

    def _count_decode_steps(self, num_steps: int) -> None:
        if self._decode and self._decoding.num:
            if self._saw_kv_tokens is not None:
                kv_tokens = self._decode_sums()[1] if self._held else self._decoding.kv_tokens
                self._saw_kv_tokens(kv_tokens + (num_steps - 1) * self._decoding.num)
            self._decoding.steps += num_steps
            self._next_ps += self._slope_ps * num_steps
            if self._uneven is not None and not self._uneven.advance(num_steps):
                self._uneven = None
            self._steps_alike -= num_steps
            if not self._closed or self._steps_alike <= 0:
                self._known = False

    def _decode_tokens(self) -> tuple[NDArray[np.uint32], TokenIds, NDArray[np.int64]]:
        """Return (handles, tokens, orders) of the decoding rows in this step, without regard to their ends."""
        if not self._decode or not self._decoding.num:
            return np.empty(0, np.uint32), np.empty(0, np.uint32), np.empty(0, np.int64)
        step = self._decoding.steps
        if self._decode_rows is None:
            decoding = (row for row in self._rows.values() if row.decoding)
            self._decode_rows = DecodeRows(decoding, step, self._spelling)
        tokens = self._decode_rows.tokens(step, self._decoding.steps_to_end)
        return self._decode_rows.handles, tokens, self._decode_rows.orders

    def _finish_decodes(self) -> list[Row]:
        """Count the decode step, and remove the rows that end with it, in join order."""
        self._count_decode_steps(1)
        return self._pop_finished()

    def _pop_finished(self) -> list[Row]:
        finished = self._decoding.finished()
        for row in finished:
            self._end(row, row.kv_offset + self._decoding.steps)
        return finished

    def _run_prefills(self) -> list[Row]:
        """Fill the cache; return the rows past their prompt, which begin to decode in the next step."""
        past_prompt: list[Row] = []
        for work in self._prefills:
            row = self._rows[work.handle]
            self._partial_tokens += work.past_tokens + work.new_tokens - row.cached_tokens
            row.cached_tokens = work.past_tokens + work.new_tokens
            if work.samples:
                past_prompt.append(row)
        self._prefills, self._prefill_ps = (), None
        return past_prompt

    def _admit_to_decode(self, rows: Sequence[Row]) -> list[Row]:
        """Make prefilled rows decode from the next step on; return those that ended with their prefill."""
        finished: list[Row] = []
        for row in rows:
            if row.last_position == row.first_position:
                self._end(row, row.cached_tokens)
                finished.append(row)
                continue
            self._partial_tokens -= row.cached_tokens
            self._decoding.add(row)
            self._adapters.add(row.sequence)
            self._decode_rows, self._known = None, False
        return finished


def _order(row: Row) -> int:
    return row.order


def _ends(rows: list[Row]) -> tuple[tuple[int, FinishReason], ...]:
    return tuple([(row.sequence.handle, row.sequence.ending.reason) for row in rows])
