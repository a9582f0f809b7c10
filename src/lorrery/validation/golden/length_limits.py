"""`length_limits`: S-LoRA's checks of prompt and total length, against `scheduler.core.limits`."""

from lorrery.scheduler.core.limits import Limits, check_lengths
from lorrery.validation.golden.kind import Mismatch, Record, compare


class LengthLimits:
    """A request accepted or refused by its lengths, with S-LoRA's message."""

    name = "length_limits"

    def detect(self, record: Record) -> bool:
        """Whether the record carries limits and lengths."""
        return record.keys() >= {"max_req_input_len", "max_req_total_len", "prompt_tokens", "max_new_tokens", "error"}

    def replay(self, record: Record) -> list[Mismatch]:
        """Check the lengths and compare the message."""
        limits = Limits(record["max_req_input_len"], record["max_req_total_len"], record["max_total_token_num"])
        error = check_lengths(record["prompt_tokens"], record["max_new_tokens"], limits)
        return compare("error", record["error"], error)
