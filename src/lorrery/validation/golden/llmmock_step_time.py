"""`llmmock_step_time`: llm-mock's step-time formula, against `worker.device.llm_mock`, to 1e-6 relative.

Ours counts integer picoseconds and rounds its cost coefficient once, by 6.4e-8 of it.
"""

from lorrery.validation.golden.kind import Mismatch, Record, compare_close
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.llm_mock import LlmMock

RELATIVE_TOLERANCE = 1e-6


class LlmMockStepTime:
    """One batch, and the duration of its step."""

    name = "llmmock_step_time"

    def detect(self, record: Record) -> bool:
        """Whether the record has a batch and its time."""
        return record.keys() >= {"tasks", "step_time_s"}

    def replay(self, record: Record) -> list[Mismatch]:
        """Time the batch; if it has decodes only, also as the first step of a segment."""
        prefills: list[PrefillChunk] = []
        decode_kv_tokens: list[int] = []
        for length, first_new in record["tasks"]:
            # The original has no decodes: a decode is a sequence with one new token.
            if length - first_new == 1:
                decode_kv_tokens.append(first_new)
            else:
                prefills.append(PrefillChunk(length - first_new, first_new, samples=True))
        num_decodes, kv_tokens, max_kv_tokens = (
            len(decode_kv_tokens),
            sum(decode_kv_tokens),
            max(decode_kv_tokens, default=0),
        )
        model = LlmMock()
        times = {"step_time_s": model.step_ps(Batch(tuple(prefills), num_decodes, kv_tokens, max_kv_tokens))}
        if not prefills:
            segment = model.decode_segment(num_decodes, kv_tokens, max_kv_tokens)
            if segment is not None:
                times["step_time_s as a segment"] = segment.step_ps(0)
        found: list[Mismatch] = []
        for where, step_ps in times.items():
            found += compare_close(where, record["step_time_s"], step_ps / PS_PER_SECOND, RELATIVE_TOLERANCE)
        return found
