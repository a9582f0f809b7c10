"""`llmmock_decode_length`: the output length of llm-mock for a prompt, against `worker.device.output`."""

from lorrery.validation.golden.kind import Mismatch, Record, compare
from lorrery.worker.device.output import LlmMockLength


class LlmMockDecodeLength:
    """Lengths of a prompt and its answer."""

    name = "llmmock_decode_length"

    def detect(self, record: Record) -> bool:
        """Whether the record has the two lengths and at most a name in addition."""
        return record.keys() - {"id"} == {"prompt_len", "decode_length"}

    def replay(self, record: Record) -> list[Mismatch]:
        """Draw from the length model and compare."""
        end = LlmMockLength().draw(seed=0, prompt_tokens=record["prompt_len"])
        return compare("decode_length", record["decode_length"], end.output_tokens)
