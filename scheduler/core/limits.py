"""The three length limits a request meets before it may enter a queue.

They are S-LoRA's, in its order and with its words (slora/server/httpserver/manager.py, `generate`); the first violated
limit is the one reported:

    prompt_tokens                           <= max_req_input_len
    prompt_tokens + max_new_tokens          <= max_req_total_len
    prompt_tokens + max_new_tokens + 1      <= max_total_token_num

All are in tokens, and the prompt's length is that of the tokenised prompt, its begin-of-sequence token included. The
last limit ignores the adapter's own 4 x rank pool tokens: a request may pass here and still never fit.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on one request, all in tokens.

    Attributes:
        max_req_input_len: longest prompt.
        max_req_total_len: longest prompt plus output.
        max_total_token_num: the KV pool, which must hold the whole request and one token more.
    """

    max_req_input_len: int
    max_req_total_len: int
    max_total_token_num: int


def check_lengths(prompt_tokens: int, max_new_tokens: int, limits: Limits) -> str | None:
    """Return the violated limit of a request's lengths, or None if it is within every limit.

    Args:
        prompt_tokens: length of the tokenised prompt.
        max_new_tokens: most tokens the request may produce.
        limits: the limits to hold it against.
    """
    total_tokens = prompt_tokens + max_new_tokens
    if prompt_tokens > limits.max_req_input_len:
        return f"the input prompt token len {prompt_tokens} is too long > {limits.max_req_input_len}"
    if total_tokens > limits.max_req_total_len:
        return (
            "the req token total len (input len + output len) is too long > "
            f"max_req_total_len:{limits.max_req_total_len}"
        )
    if total_tokens + 1 > limits.max_total_token_num:
        return (
            "the req token total len + 1 (input len + output len + 1) is too long > "
            f"max_total_token_num:{limits.max_total_token_num}"
        )
    return None
