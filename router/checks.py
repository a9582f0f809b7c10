"""Limits on what clients send, checked before anything costly is done with it.

The scheduler would refuse a prompt over the limit too, but only after it has been encoded, which takes the router about
0.3 s per megabyte.
"""

from array import array
from collections.abc import Collection, Sequence

import numpy as np

from lorrery.service.errors import InvalidRequest, NeverFits
from lorrery.service.names import MAX_NAME_CHARACTERS, quoted, too_long, why_no_name
from lorrery.service.network.server import RECEIVE_BYTES
from lorrery.tokenizer.base import Tokenizer

_TOKEN_ID_BYTES = 5
"""Largest protobuf varint of a 32-bit number."""
_OTHER_BYTES = 64 * 1024

MAX_TOP_LOGPROBS = 20
"""vLLM's default, and the limit of OpenAI's chat route."""
MAX_SALT_CHARACTERS = 128
_NOT_IN_SALT = frozenset("@/\\\0")


def check_length(field: str, value: str) -> None:
    """Check the length of an id or name.

    Raises:
        InvalidRequest: it is over `MAX_NAME_CHARACTERS`.
    """
    why = too_long(value)
    if why is not None:
        raise InvalidRequest(f"{field} {why}", field=field, value=quoted(value), limit=MAX_NAME_CHARACTERS)


def check_adapter_id(adapter_id: str, models: Collection[str], instead: str = "give another name") -> None:
    """Check an adapter id; `instead`: advice if it is one of `models`, the names of the base model.

    Raises:
        InvalidRequest: it is empty or too long, has blanks or control characters, or is a name of the base model.
    """
    why = why_no_name(adapter_id)
    if why is None and adapter_id in models:
        why = f"is {quoted(adapter_id)}, the base model's name; {instead}"
    if why is not None:
        raise InvalidRequest(
            f"adapter_id {why}", field="adapter_id", value=quoted(adapter_id), limit=MAX_NAME_CHARACTERS
        )


def check_cache_salt(cache_salt: str) -> None:
    """Check a salt by vLLM's rule; empty: there is none.

    Raises:
        InvalidRequest: it is too long, or has a character that names of files and stores cannot have.
    """
    if len(cache_salt) > MAX_SALT_CHARACTERS or not _NOT_IN_SALT.isdisjoint(cache_salt):
        raise InvalidRequest(
            f"Parameter 'cache_salt' must be at most {MAX_SALT_CHARACTERS} characters and must not contain '@', '/',"
            " '\\\\', or NUL.",
            field="cache_salt",
            value=quoted(cache_salt),
            limit=MAX_SALT_CHARACTERS,
        )


def check_text(field: str, text: str, tokenizer: Tokenizer, max_req_input_len: int) -> None:
    """Check by its size alone that a text may fit into `max_req_input_len` tokens.

    Raises:
        NeverFits: it would not fit even if it consisted of the longest tokens only.
    """
    # A character has one to four bytes, so most texts need not be encoded for this check.
    most = most_text_bytes(tokenizer, max_req_input_len)
    if 4 * len(text) > most and (size := len(text.encode())) > most:
        raise text_too_long(field, size, tokenizer, max_req_input_len)


def most_text_bytes(tokenizer: Tokenizer, max_req_input_len: int) -> int:
    """Return the size of the longest text that may fit into `max_req_input_len` tokens."""
    return max_req_input_len * tokenizer.longest_token_bytes


def text_too_long(
    field: str, size: int, tokenizer: Tokenizer, max_req_input_len: int, *, more: bool = False
) -> NeverFits:
    """Return the error for a text that cannot fit; `size`: its bytes, or `more` if it was not written to its end."""
    longest, most = tokenizer.longest_token_bytes, most_text_bytes(tokenizer, max_req_input_len)
    return NeverFits(
        f"{field} has {'over ' if more else ''}{size} bytes; max_req_input_len is {max_req_input_len} tokens, which are"
        f" {most} bytes at most (the longest token has {longest}); give a shorter one",
        field=field,
        value=size,
        limit=most,
        least_prompt_tokens=-(-size // longest),
        max_req_input_len=max_req_input_len,
    )


def receive_bytes(max_req_input_len: int, longest_token_bytes: int, max_stop_bytes: int) -> int:
    """Return the size of the largest message that clients may send.

        2 x (max_req_input_len x max(5, longest_token_bytes) + max_stop_bytes + 64 KiB), and 4 MiB at least

    A token id takes at most 5 bytes, a text at most those of its longest tokens; names and numbers take far less than
    64 KiB. The factor 2 leaves room for a prompt that is moderately too long, so that the client gets Lorrery's error
    with the lengths. 4 MiB is gRPC's own default, which clients expect.
    """
    prompt_bytes = max_req_input_len * max(_TOKEN_ID_BYTES, longest_token_bytes)
    return max(RECEIVE_BYTES, 2 * (prompt_bytes + max_stop_bytes + _OTHER_BYTES))


def check_prompt_tokens(prompt_tokens: int, max_new_tokens: int, max_req_input_len: int) -> None:
    """Check the length of a prompt, with S-LoRA's message.

    Raises:
        NeverFits: it exceeds `max_req_input_len`.
    """
    if prompt_tokens > max_req_input_len:
        raise NeverFits(
            f"the input prompt token len {prompt_tokens} is too long > {max_req_input_len} (max_req_input_len is"
            f" {max_req_input_len}); give a shorter prompt",
            field="prompt",
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            max_req_input_len=max_req_input_len,
        )


def check_stop_strings(stop_strings: Sequence[str], max_stop_strings: int, max_stop_bytes: int) -> None:
    """Check the number of stop strings and their total size.

    Raises:
        InvalidRequest: there are too many, or they are too long together.
    """
    field = "stop_sequences"
    if len(stop_strings) > max_stop_strings:
        raise InvalidRequest(
            f"{field} has {len(stop_strings)} strings; max_stop_strings is {max_stop_strings}; give fewer",
            field=field,
            value=len(stop_strings),
            limit=max_stop_strings,
        )
    if (size := sum(len(text.encode()) for text in stop_strings)) > max_stop_bytes:
        raise InvalidRequest(
            f"{field} has {size} bytes in all; max_stop_bytes is {max_stop_bytes}; give fewer or shorter ones",
            field=field,
            value=size,
            limit=max_stop_bytes,
        )


def check_stop_tokens(token_ids: Sequence[int], most: int, vocab_size: int) -> None:
    """Check the number of stop tokens, and that they are in the vocabulary.

    Raises:
        InvalidRequest: there are too many, or one is not in the vocabulary.
    """
    field = "stop_token_ids"
    if len(token_ids) > most:
        raise InvalidRequest(
            f"{field} has {len(token_ids)} tokens; max_stop_strings is {most}; give fewer",
            field=field,
            value=len(token_ids),
            limit=most,
        )
    if token_ids:
        check_token_ids(field, array("I", token_ids), vocab_size)


def check_token_ids(field: str, token_ids: "array[int]", vocab_size: int) -> None:
    """Check that every token is in the vocabulary.

    Raises:
        InvalidRequest: one is not; the message names it.
    """
    outside = np.frombuffer(token_ids, np.uint32) >= vocab_size
    if outside.any():
        at = int(outside.argmax())
        raise InvalidRequest(
            f"{field}[{at}] is {token_ids[at]}; the vocabulary has {vocab_size} tokens, so at most {vocab_size - 1} is"
            " allowed",
            field=f"{field}[{at}]",
            value=token_ids[at],
            limit=vocab_size - 1,
        )


def check_top_logprobs(num_top: int) -> None:
    """Check the number of alternatives that a request asks for.

    Raises:
        InvalidRequest: it exceeds `MAX_TOP_LOGPROBS`.
    """
    if num_top > MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs is {num_top}; a token has at most {MAX_TOP_LOGPROBS} alternatives; ask for fewer",
            field="top_logprobs",
            value=num_top,
            limit=MAX_TOP_LOGPROBS,
        )
