"""The decoding sequences of a batch and the adapters that it uses, as sums, and the order in which sequences end."""

import bisect
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lorrery.vocabulary.machine_ints import bisect_left, insort
from lorrery.worker.device.rows import Row

if TYPE_CHECKING:
    from mypy_extensions import i64

from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, PrefillWork
from lorrery.worker.device.rows import DeviceSequence
from lorrery.worker.device.steptime import StepTimeModel


class KnownEnds:
    """The next steps of a batch whose ends were computed one by one, as they have no closed form.

    The steps follow one another without a decision between them.

    Args:
        ends_ps: end of each step, from the start of the first; at least one.
    """

    __slots__ = ("_ends_ps", "_num_done")

    def __init__(self, ends_ps: list[int]) -> None:
        self._ends_ps = ends_ps
        self._num_done = 0

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
        return min(
            limit, bisect.bisect_left(self._ends_ps, self._done_ps + duration_ps, first, first + limit) - first + 1
        )

    @property
    def _done_ps(self) -> int:
        return self._ends_ps[self._num_done - 1] if self._num_done else 0

    def advance(self, num_steps: int) -> bool:
        """Move past steps; return whether a further one was computed."""
        self._num_done += num_steps
        assert self._num_done <= len(self._ends_ps), "no more steps than are known"
        return self._num_done < len(self._ends_ps)


class Decoding:
    """The decoding sequences, as sums, and in the order in which they end.

    A sequence stores its values at the start of its decoding (`rows.Row`); one counter of decode steps gives the
    current ones. With n sequences, s steps, and o_i cached tokens of each less the counter at its start, the cache
    holds sum(o_i) + n s. So a step of any batch changes one number.

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


class ChunkRun(KnownEnds):
    """Steps that compute one long prompt, chunk by chunk, in one run.

    While a prompt takes all that is left of a step's token budget, its steps differ only in what is already cached.
    With c tokens in each chunk after p others, and n decodes that hold K tokens, the longest of them l:

        step i = step_ps(a chunk of c tokens after p + i c; n decodes that hold K + i n tokens, the longest l + i)

    No decision is needed between two of them. Attention over cached tokens has no closed sum (its tiles overlap by a
    power, and are rounded), so each needed step is computed separately, and the times are those of single steps, to the
    picosecond. A model that can do this with less than one call per step has `piece_ends_ps` (`steptime`).

    Args:
        ends_ps: see `KnownEnds`.
        work: the first chunk, which does not end its prompt.
    """

    __slots__ = ("_work",)

    def __init__(self, ends_ps: list[int], work: PrefillWork) -> None:
        super().__init__(ends_ps)
        self._work = work

    @property
    def next_work(self) -> PrefillWork:
        """The chunk of the next step."""
        work = self._work
        return PrefillWork(work.handle, work.new_tokens, work.past_tokens + self._num_done * work.new_tokens, False)


def chunk_run(
    step_time: StepTimeModel, work: PrefillWork, batch: Batch, max_steps: int, duration_ps: int | None
) -> tuple[ChunkRun, int, int]:
    """Compute at most `max_steps` steps, to the first end at or after `duration_ps`; return number and time, too.

    Args:
        step_time: model of a step's duration; it does not read `Batch.decode_lengths`.
        work: the first chunk, which does not end its prompt.
        batch: the first step.
        max_steps: at least 1.
        duration_ps: None: no bound.
    """
    piece_ends_ps = getattr(step_time, "piece_ends_ps", None)
    if piece_ends_ps is not None:
        ends_ps: list[int] = piece_ends_ps(batch, max_steps, duration_ps)
        return ChunkRun(ends_ps, work), len(ends_ps), ends_ps[-1]
    ends_ps = []
    num, kv_tokens, longest = batch.num_decodes, batch.decode_kv_tokens, batch.max_decode_kv_tokens
    new_tokens, past_tokens = work.new_tokens, work.past_tokens
    end_ps = step = 0
    while step < max_steps:
        piece = PrefillWork(work.handle, new_tokens, past_tokens + step * new_tokens, False)
        grown = step if num else 0
        end_ps += step_time.step_ps(Batch((piece,), num, kv_tokens + step * num, longest + grown, batch.lora))
        ends_ps.append(end_ps)
        step += 1
        if duration_ps is not None and end_ps >= duration_ps:
            break
    return ChunkRun(ends_ps, work), step, end_ps


class DecodingAdapters:
    """The adapters of the decoding sequences.

    Sequences of one adapter key have one rank: a key names an adapter in one version. Cost: O(1) per sequence that
    joins or leaves, O(distinct ranks) for the sums.
    """

    def __init__(self) -> None:
        self._users: dict[str, int] = {}  # adapter -> sequences
        self._ranks: dict[int, int] = {}  # rank -> adapters
        self._rank_sum = self._num_users = self._rank_users = 0
        self._work: LoraWork | None = NO_LORA

    def add(self, sequence: DeviceSequence) -> None:
        """Count a sequence that begins to decode."""
        if not sequence.adapter_key:
            return
        rank, users = sequence.adapter_rank, self._users.get(sequence.adapter_key, 0)
        self._users[sequence.adapter_key] = users + 1
        if not users:
            self._rank_sum += rank
            self._ranks[rank] = self._ranks.get(rank, 0) + 1
        self._num_users += 1
        self._rank_users += rank
        self._work = None

    def remove(self, sequence: DeviceSequence) -> None:
        """Remove a sequence that was counted."""
        if not sequence.adapter_key:
            return
        rank, users = sequence.adapter_rank, self._users[sequence.adapter_key]
        if users > 1:
            self._users[sequence.adapter_key] = users - 1
        else:
            del self._users[sequence.adapter_key]
            self._rank_sum -= rank
            self._ranks[rank] -= 1
            if not self._ranks[rank]:
                del self._ranks[rank]
        self._num_users -= 1
        self._rank_users -= rank
        self._work = None

    @property
    def work(self) -> LoraWork:
        """The adapters' work in a step of decodes alone."""
        if self._work is None:
            self._work = self._sums(len(self._users), self._rank_sum, 0, self._num_users, self._rank_users)
        return self._work

    def work_with(self, prefills: Iterable[tuple[DeviceSequence, int]], *, decode: bool) -> LoraWork:
        """Return the adapters' work in a step that also computes prompt chunks.

        Args:
            prefills: (sequence, its new tokens) of each chunk.
            decode: whether the decoding sequences take part.
        """
        there = self._users if decode else {}
        newcomers: dict[str, int] = {}  # adapter -> rank, for adapters of no decoding sequence
        num_tokens = rank_tokens = 0
        for sequence, new_tokens in prefills:
            if sequence.adapter_key:
                num_tokens += new_tokens
                rank_tokens += sequence.adapter_rank * new_tokens
                if sequence.adapter_key not in there:
                    newcomers[sequence.adapter_key] = sequence.adapter_rank
        if not newcomers and not there:
            return NO_LORA
        rank_sum = max_rank = 0
        for rank in newcomers.values():
            rank_sum += rank
            max_rank = max(max_rank, rank)
        if not decode:
            return LoraWork(len(newcomers), rank_sum, max_rank, num_tokens, rank_tokens)
        return self._sums(
            len(self._users) + len(newcomers),
            self._rank_sum + rank_sum,
            max_rank,
            self._num_users + num_tokens,
            self._rank_users + rank_tokens,
        )

    def _sums(self, num_adapters: int, rank_sum: int, max_rank: int, num_tokens: int, rank_tokens: int) -> LoraWork:
        if not num_adapters:
            return NO_LORA
        for rank in self._ranks:
            if rank > max_rank:
                max_rank = rank
        return LoraWork(num_adapters, rank_sum, max_rank, num_tokens, rank_tokens)
