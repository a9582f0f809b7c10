"""What a client may give at most, checked before anything costly is done with it.

A prompt over the limit would be refused by the scheduler anyway, but only after it had been encoded, which takes the
router about 0.3 s a megabyte.
"""

from array import array

import numpy as np

from lorrery.chassis.errors import InvalidRequest
from lorrery.router.tokenizer import Tokenizer

MAX_NAME_CHARACTERS = 512
"""Longest id or name that a client may give: names travel in every message about a request and in the log."""

MAX_QUOTED_CHARACTERS = 100
"""So much of a client's value stands in a message or in the log."""


def quoted(value: str) -> str:
    """Return a client's value for a message, cut where it is long."""
    if len(value) <= MAX_QUOTED_CHARACTERS:
        return repr(value)
    return f"{value[:MAX_QUOTED_CHARACTERS]!r}..."


def check_name(field: str, value: str) -> None:
    """Check the length of an id or name.

    Raises:
        InvalidRequest: it is over `MAX_NAME_CHARACTERS`.
    """
    if len(value) > MAX_NAME_CHARACTERS:
        raise InvalidRequest(
            f"{field} has {len(value)} characters; at most {MAX_NAME_CHARACTERS} are allowed; it begins {quoted(value)}"
        )


def check_text(field: str, text: str, tokenizer: Tokenizer, max_req_input_len: int) -> None:
    """Check that a text may fit into `max_req_input_len` tokens, by its size alone.

    Raises:
        InvalidRequest: even if it were made of the longest tokens only, it would not fit.
    """
    longest = tokenizer.longest_token_bytes
    most = max_req_input_len * longest
    # A character takes one to four bytes, so most texts need not be encoded to be measured.
    if 4 * len(text) <= most:
        return
    if (size := len(text.encode())) > most:
        raise InvalidRequest(
            f"{field} has {size} bytes; max_req_input_len is {max_req_input_len} tokens, which are {most} bytes at most"
            f" (the longest token has {longest}); give a shorter one"
        )


def check_token_ids(field: str, token_ids: "array[int]", vocab_size: int) -> None:
    """Check that the vocabulary has every token.

    Raises:
        InvalidRequest: it does not have one; the message says which.
    """
    outside = np.frombuffer(token_ids, np.uint32) >= vocab_size
    if outside.any():
        at = int(outside.argmax())
        raise InvalidRequest(
            f"{field}[{at}] is {token_ids[at]}; the vocabulary has {vocab_size} tokens, so at most {vocab_size - 1} is"
            " allowed"
        )
