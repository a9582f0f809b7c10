"""Steps that compute one long prompt, chunk by chunk, in one run.

While a prompt takes all that is left of a step's token budget, its steps differ only in what is already cached. With c
tokens in each chunk after p others, and n decodes that hold K tokens, the longest of them l:

    step i = step_ps(a chunk of c tokens after p + i c; n decodes that hold K + i n tokens, the longest l + i)

No decision is needed between two of them. Attention over cached tokens has no closed sum (its tiles overlap by a power,
and are rounded), so each needed step is computed separately, and the times are those of single steps, to the
picosecond. A model that can do this with less than one call per step has `piece_ends_ps` (`steptime`).
"""

from lorrery.worker.device.batch import Batch
from lorrery.worker.device.known_ends import KnownEnds
from lorrery.worker.device.steptime import StepTimeModel
from lorrery.worker.device.work import PrefillWork


class ChunkRun(KnownEnds):
    """The next steps of a run.

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
