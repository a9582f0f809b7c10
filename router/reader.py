"""Turns client messages into requests: runs every check that needs no scheduler, then packs the tokens."""

import asyncio
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any
from uuid import uuid4

from lorrery.router import wire
from lorrery.router.access import Access, ApiKey, check_use
from lorrery.router.checks import (
    check_adapter_id,
    check_cache_salt,
    check_length,
    check_prompt_tokens,
    check_stop_strings,
    check_stop_tokens,
    check_text,
    check_token_ids,
    check_top_logprobs,
    most_text_bytes,
    text_too_long,
)
from lorrery.router.edges.structured_output.drawing import SharedConstraint
from lorrery.router.open_request import stop_token_sequences
from lorrery.router.request import Request
from lorrery.router.sampling import SamplingParams, check_least
from lorrery.service.errors import InvalidRequest, Reason, UnknownName
from lorrery.service.names import quoted, why_no_name
from lorrery.service.settings.cluster import Settings
from lorrery.tokenizer.base import TextTooLongError, Tokenizer
from lorrery.v1 import router_pb2
from lorrery.vocabulary import u32
from lorrery.vocabulary.outputs import hash64


class RequestReader:
    """Builds requests from clients' messages.

    Args:
        settings: with the limits.
        tokenizer: for prompts and stop strings.
        access: maps callers to tenants.

    Attributes:
        served: names of the base model.
    """

    def __init__(self, settings: Settings, tokenizer: Tokenizer, access: Access) -> None:
        self._settings = settings
        self.served = settings.served_model_names
        self._tokenizer = tokenizer
        self._access = access
        seed = settings.router.seed
        self._drawing = asyncio.Lock()
        self._random_bits = random.getrandbits if seed is None else random.Random(seed).getrandbits

    async def read(
        self, message: router_pb2.GenerateRequest, caller: ApiKey, constraint: SharedConstraint | None = None
    ) -> Request:
        """Check a client's message and return it as a request; `constraint`: on its output, in place of its own.

        Raises:
            RequestError: the message is invalid, or its key does not allow it.
        """
        check_length("tenant_id", message.tenant_id)
        check_length("request_id", message.request_id)
        check_length("group.id", message.group.id)
        adapter_id = self.adapter_id(message)
        if adapter_id:
            check_adapter_id(adapter_id, self._settings.model_names, "leave it empty to ask the base model")
        sampling = self._sampling(message)
        check_top_logprobs(message.top_logprobs)
        check_cache_salt(message.cache_salt)
        if message.HasField("true_output_tokens") and message.true_output_tokens < 1:
            raise InvalidRequest("true_output_tokens must be at least 1, got 0", field="true_output_tokens", value=0)
        tenant_id = self._access.tenant(caller, message.tenant_id)
        fills_context = message.fill_context and not message.sampling.HasField("max_new_tokens")
        check_use(caller, adapter_id, 1 if fills_context else sampling.max_new_tokens, 0)
        scheduler = self._settings.scheduler
        prompt = await prompt_token_ids(message, self._tokenizer, sampling.max_new_tokens, scheduler.max_req_input_len)
        if message.fill_context:
            room = self._room(len(prompt), caller)
            if message.sampling.HasField("max_new_tokens"):
                room = min(room, sampling.max_new_tokens)
            sampling = replace(sampling, max_new_tokens=room)
        check_use(caller, adapter_id, sampling.max_new_tokens, len(prompt))
        check_least(sampling)
        prompt_u32 = u32.pack(prompt)
        seed = message.seed if message.HasField("seed") else self._seed(message, sampling, prompt_u32)
        if constraint is None and message.HasField("constraint"):
            constraint = SharedConstraint(message.constraint)
        output = None if constraint is None else await self._given_output(constraint, seed)
        if output is None and message.allowed_token_ids:
            output = self._allowed_output(message.allowed_token_ids, sampling, seed)
        if output is not None:
            sampling = replace(sampling, ignore_eos=False, min_new_tokens=0)
        return Request(
            request_id=message.request_id or uuid4().hex,
            adapter_id=adapter_id,
            tenant_id=tenant_id,
            prompt_token_ids_u32=prompt_u32,
            sampling=sampling,
            stop_token_sequences=await self._stop_token_sequences(sampling),
            seed=seed,
            true_output_tokens=message.true_output_tokens,
            priority=message.priority,
            cache_salt=message.cache_salt,
            output_token_ids_u32=b"" if output is None else u32.pack(output),
            eos_id=self._tokenizer.eos_id,
            key=caller if self._access.counts else None,
            top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
            skips_prefix_cache=message.skips_prefix_cache,
            group=wire.read_group(message),
        )

    def adapter_id(self, message: router_pb2.GenerateRequest) -> str:
        """Return the adapter that a message names as its adapter or as its model; empty: the base model.

        Raises:
            UnknownName: `model` cannot be an adapter's name, or contradicts `adapter_id`.
        """
        model = message.model
        check_length("model", model)
        if model in ("", self._settings.model, *self.served):
            return message.adapter_id
        if message.adapter_id not in ("", model) or why_no_name(model) is not None:
            raise unknown_model(model, self.served[0])
        return model

    def _seed(self, message: router_pb2.GenerateRequest, sampling: SamplingParams, prompt_token_ids_u32: bytes) -> int:
        """Return a seed for a request without one: drawn, or the prompt's if greedy decoding is asked for.

        Greedy output follows from the prompt and the adapter, and a worker adds the adapter to the seed. Requests that
        are greedy because S-LoRA's default is, without asking for it, get a drawn seed: their outputs should differ.
        """
        if sampling.is_greedy and message.sampling.HasField("do_sample"):
            return int.from_bytes(blake2b(prompt_token_ids_u32, digest_size=8).digest(), "little")
        return self._random_bits(64)

    def _sampling(self, message: router_pb2.GenerateRequest) -> SamplingParams:
        limits, asked = self._settings.router, message.sampling
        check_stop_strings(asked.stop_sequences, limits.max_stop_strings, limits.max_stop_bytes)
        check_stop_tokens(asked.stop_token_ids, limits.max_stop_strings, self._tokenizer.vocab_size)
        return wire.sampling_params(asked)

    async def _given_output(self, constraint: SharedConstraint, seed: int) -> list[int] | None:
        """Return the tokens of the output that a constraint gives, with its end; None: it gives none."""
        async with constraint.turn:
            drawing = asyncio.create_task(self._draw(constraint, seed))
            drawing.add_done_callback(lambda done: done.cancelled() or done.exception())  # of a call that is cancelled
            text = await asyncio.shield(drawing)  # which leaves a thread that computes, and the lock with it
        if text is None:
            return None
        token_ids = await encoded(self._tokenizer.encode_stop, text)
        return [*token_ids, self._tokenizer.eos_id]

    def _allowed_output(self, allowed: Sequence[int], sampling: SamplingParams, seed: int) -> list[int]:
        """Return one allowed token more than there may be, or those up to an end of sequence if that is one."""
        check_token_ids("allowed_token_ids", array("I", allowed), self._tokenizer.vocab_size)
        eos_id = None if sampling.ignore_eos else self._tokenizer.eos_id
        output: list[int] = []
        while len(output) <= sampling.max_new_tokens and eos_id not in output[-1:]:
            output.append(allowed[hash64(seed, len(output)) % len(allowed)])
        return output

    async def _draw(self, constraint: SharedConstraint, seed: int) -> str | None:
        async with self._drawing:  # one at a time: each thread that computes delays the event loop by up to 5 ms
            return await asyncio.to_thread(constraint.draw, seed)

    def _room(self, prompt_tokens: int, caller: ApiKey) -> int:
        """Return how many tokens may follow a prompt within the limits of the cluster and of the key, at least 1."""
        scheduler = self._settings.scheduler
        rooms = [scheduler.max_req_total_len - prompt_tokens]
        if scheduler.max_total_token_num is not None:
            rooms.append(scheduler.max_total_token_num - 1 - prompt_tokens)
        if caller.max_new_tokens is not None:
            rooms.append(caller.max_new_tokens)
        if caller.tokens_per_minute is not None:
            rooms.append(caller.tokens_per_minute - prompt_tokens)
        return max(1, min(rooms))  # a prompt without room is refused later for its length

    async def _stop_token_sequences(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        single = tuple((token_id,) for token_id in sampling.stop_token_ids)
        stop_strings = sampling.stop_sequences
        if not stop_strings:
            return single
        if sum(map(len, stop_strings)) > LONG_TEXT_CHARACTERS:
            return single + await asyncio.to_thread(stop_token_sequences, stop_strings, self._tokenizer)
        return single + stop_token_sequences(stop_strings, self._tokenizer)


def unknown_model(model: str, served: str) -> UnknownName:
    """Return the error for an unknown model; its text begins as vLLM's does.

    Args:
        model: name that the client gave.
        served: name of the base model.
    """
    return UnknownName(
        f"The model {quoted(model)} does not exist; this cluster serves {served!r} and the adapters that ListAdapters"
        " lists",
        Reason.UNKNOWN_MODEL,
        field="model",
        value=quoted(model),
        served=served,
    )


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
