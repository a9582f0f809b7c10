"""Converts clients' prompts to token ids."""

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from lorrery.chassis.errors import InvalidRequest
from lorrery.router.checks import check_prompt_tokens, check_text, check_token_ids, most_text_bytes, text_too_long
from lorrery.tokenizer.base import TextTooLongError, Tokenizer
from lorrery.v1 import router_pb2

# Encoding this many characters takes about a millisecond; longer texts are encoded in a thread.
LONG_TEXT_CHARACTERS = 8192


async def prompt_token_ids(
    message: router_pb2.GenerateRequest, tokenizer: Tokenizer, max_new_tokens: int, max_req_input_len: int
) -> Sequence[int]:
    """Return the tokens of a message's prompt: `truncate_prompt_tokens` of them, if set.

    Args:
        message: as the client sent it.
        tokenizer: for texts.
        max_new_tokens: output limit of the request, for error messages.
        max_req_input_len: upper bound on the tokens.

    Raises:
        RequestError: the prompt is empty, too long, or has tokens outside the vocabulary.
    """
    kind = message.WhichOneof("prompt")
    token_ids: Sequence[int] = ()
    if kind == "token_ids":
        token_ids = _truncated(message.token_ids.ids, message)
        check_prompt_tokens(len(token_ids), max_new_tokens, max_req_input_len)
        token_ids = array("I", token_ids)
        check_token_ids("token_ids", token_ids, tokenizer.vocab_size)
    elif message.text:
        check_text("text", message.text, tokenizer, max_req_input_len)
        encoded = await encode_prompt(tokenizer, message.text, special_tokens=not message.without_special_tokens)
        token_ids = _truncated(encoded, message, () if message.without_special_tokens else tokenizer.encode_prompt(""))
        check_prompt_tokens(len(token_ids), max_new_tokens, max_req_input_len)
    if not token_ids:
        raise InvalidRequest("prompt is empty; give text or token_ids", field="prompt")
    return token_ids


def _truncated(
    token_ids: Sequence[int], message: router_pb2.GenerateRequest, begin: Sequence[int] = ()
) -> Sequence[int]:
    """Return the tokens that count; `begin`: those that begin any text, which stay unless a side is given."""
    most, side = message.truncate_prompt_tokens, message.truncation_side
    if not message.HasField("truncate_prompt_tokens") or len(token_ids) <= most:
        return token_ids
    if most < 1:
        raise InvalidRequest(
            "truncate_prompt_tokens is 0; it must be at least 1", field="truncate_prompt_tokens", value=0, limit=1
        )
    if side == router_pb2.TRUNCATION_SIDE_RIGHT:
        return token_ids[:most]
    kept = list(begin[:most]) if side == router_pb2.TRUNCATION_SIDE_UNSPECIFIED else []
    return [*kept, *token_ids[len(token_ids) - most + len(kept) :]]


async def encode_prompt(tokenizer: Tokenizer, text: str, *, special_tokens: bool = True) -> list[int]:
    """Return the tokens of a prompt; a long one is encoded in a thread, so that the event loop is not blocked."""
    encode = tokenizer.encode_prompt if special_tokens else tokenizer.encode_stop
    if len(text) > LONG_TEXT_CHARACTERS:
        return await asyncio.to_thread(encode, text)
    return encode(text)


async def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    max_req_input_len: int,
    *,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> list[int]:
    """Return the tokens of a conversation; a long one is encoded in a thread.

    Raises:
        InvalidRequest: the chat template refuses it.
        NeverFits: it is too long.
        UnicodeEncodeError: it has lone surrogates.
    """
    num_given = sum(map(len, map(str, (*messages, variables))))
    most_characters = most_text_bytes(tokenizer, max_req_input_len) + num_given  # so that errors have most texts' sizes

    def encode() -> list[int]:
        try:
            text = tokenizer.chat_prompt(
                messages, most_characters, add_generation_prompt=add_generation_prompt, **variables
            )
        except TextTooLongError:
            raise text_too_long("messages", most_characters, tokenizer, max_req_input_len, more=True) from None
        text.encode()
        check_text("messages", text, tokenizer, max_req_input_len)
        return tokenizer.encode_chat(text)

    if num_given > LONG_TEXT_CHARACTERS:
        return await asyncio.to_thread(encode)
    return encode()
