"""`llmmock_decode_length`: how many tokens llm-mock answers to a prompt, against `worker.device.output`."""

from lorrery.validation.golden.kind import Mismatch, Record, compare
from lorrery.worker.device.output import LlmMockLength


class LlmMockDecodeLength:
    """A prompt's length, and its answer's."""

    name = "llmmock_decode_length"

    def detect(self, record: Record) -> bool:
        """Whether the record carries the two lengths and no more than a name beside them."""
        return record.keys() - {"id"} == {"prompt_len", "decode_length"}

    def replay(self, record: Record) -> list[Mismatch]:
        """Ask the length model."""
        end = LlmMockLength().draw(seed=0, prompt_tokens=record["prompt_len"])
        return compare("decode_length", record["decode_length"], end.output_tokens)
