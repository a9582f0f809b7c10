"""Converts clients' prompts to token ids."""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lorrery.router.checks import check_prompt_tokens, check_text, check_token_ids, most_text_bytes, text_too_long
from lorrery.service.errors import InvalidRequest
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
        encode = partial(tokenizer.encode_prompt, add_special_tokens=not message.without_special_tokens)
        if not message.HasField("truncate_prompt_tokens"):
            check_text("text", message.text, tokenizer, max_req_input_len)
            token_ids = await encoded(encode, message.text)
        elif message.truncation_side != router_pb2.TRUNCATION_SIDE_UNSPECIFIED:
            token_ids = _truncated(await encoded(encode, message.text), message)
        else:
            token_ids = await encoded(partial(_encode_last, tokenizer, message), message.text)
        check_prompt_tokens(len(token_ids), max_new_tokens, max_req_input_len)
    if not token_ids:
        raise InvalidRequest("prompt is empty; give text or token_ids", field="prompt")
    return token_ids


def _encode_last(tokenizer: Tokenizer, message: router_pb2.GenerateRequest, text: str) -> list[int]:
    """Return the last tokens of a text, as many as the message wants with those that frame a prompt."""
    bare = tokenizer.encode_prompt(text, add_special_tokens=False)
    framed = bare if message.without_special_tokens else tokenizer.encode_prompt(text)
    num_added = len(framed) - len(bare)
    begin = next((at for at in range(num_added) if framed[at : at + len(bare)] == bare), num_added)
    end = begin + len(bare)
    num_kept = min(len(bare), max(0, message.truncate_prompt_tokens - num_added))
    return list(_truncated([*framed[:begin], *framed[end - num_kept : end], *framed[end:]], message))


def _truncated(token_ids: Sequence[int], message: router_pb2.GenerateRequest) -> Sequence[int]:
    if not message.HasField("truncate_prompt_tokens"):
        return token_ids
    most = message.truncate_prompt_tokens
    if most < 1:
        raise InvalidRequest(
            "truncate_prompt_tokens is 0; it must be at least 1", field="truncate_prompt_tokens", value=0, limit=1
        )
    return token_ids[:most] if message.truncation_side == router_pb2.TRUNCATION_SIDE_RIGHT else token_ids[-most:]


async def encoded(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Return the tokens of a text; a long one is encoded in a thread, so that the event loop is not blocked."""
    if len(text) > LONG_TEXT_CHARACTERS:
        return await asyncio.to_thread(encode, text)
    return encode(text)


async def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    max_req_input_len: int,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    only_count: bool = False,
    variables: Mapping[str, Any],
) -> list[int]:
    """Return the tokens of a conversation; a long one is encoded in a thread.

    Args:
        tokenizer: with the chat template.
        messages: as for `Tokenizer.chat_prompt`.
        max_req_input_len: upper bound on the tokens of a prompt.
        add_generation_prompt: append the beginning of the assistant's turn.
        continue_final_message: end with the content of the last message instead.
        add_special_tokens: frame the text as a prompt's, beside the template's own special tokens.
        only_count: it is no prompt, and may be longer than those.
        variables: further ones of the template.

    Raises:
        InvalidRequest: it is empty, is to end in two ways, or the chat template refuses it.
        NeverFits: it is too long.
        UnicodeEncodeError: it has lone surrogates.
    """
    if not messages:
        raise InvalidRequest("the conversation is empty; give at least 1 message", limit=1)
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt contradict each other: an answer continues the last"
            " message, or begins one; set add_generation_prompt to false",
            field="continue_final_message",
        )
    num_given = sum(map(len, map(str, (*messages, variables))))
    most_characters = most_text_bytes(tokenizer, max_req_input_len) + num_given  # so that errors have most texts' sizes

    def encode() -> list[int]:
        try:
            text = tokenizer.chat_prompt(
                messages,
                most_characters,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except TextTooLongError:
            raise text_too_long("messages", most_characters, tokenizer, max_req_input_len, more=True) from None
        text.encode()
        if not only_count:
            check_text("messages", text, tokenizer, max_req_input_len)
        return tokenizer.encode_prompt(text, add_special_tokens=add_special_tokens)

    if num_given > LONG_TEXT_CHARACTERS:
        return await asyncio.to_thread(encode)
    return encode()
