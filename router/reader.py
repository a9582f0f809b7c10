"""Reads what a client asks for: checks all that can be checked without a scheduler, and only then packs it."""

import asyncio
import random
from array import array
from collections.abc import Sequence
from uuid import uuid4

from lorrery.chassis.errors import InvalidRequest, Reason, UnknownName
from lorrery.chassis.names import quoted
from lorrery.router import wire
from lorrery.router.access import Access, check_use
from lorrery.router.checks import (
    check_adapter_id,
    check_length,
    check_prompt_tokens,
    check_stop_strings,
    check_text,
    check_token_ids,
)
from lorrery.router.keys import ApiKey
from lorrery.router.request import Request
from lorrery.router.stop import stop_token_sequences
from lorrery.router.tokenizer import Tokenizer
from lorrery.settings import Settings
from lorrery.v1 import router_pb2
from lorrery.vocabulary import u32

# A text of this many characters takes a millisecond or so to encode; longer ones leave the event loop for a thread.
_LONG_TEXT_CHARACTERS = 8192


class RequestReader:
    """Makes requests of clients' messages.

    Args:
        settings: with the limits.
        tokenizer: of prompts and stop strings.
        access: which tenant a caller is.
    """

    def __init__(self, settings: Settings, tokenizer: Tokenizer, access: Access) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._access = access

    async def read(self, message: router_pb2.GenerateRequest, caller: ApiKey) -> Request:
        """Check a client's message and return it as a request.

        Raises:
            RequestError: it asks for what cannot be.
        """
        for field, value in (
            ("model", message.model),
            ("tenant_id", message.tenant_id),
            ("request_id", message.request_id),
        ):
            check_length(field, value)
        model = self._settings.model
        if message.model not in ("", model):
            raise UnknownName(
                f"model {quoted(message.model)} is not served here; the cluster serves {model!r}",
                Reason.UNKNOWN_MODEL,
                field="model",
                value=quoted(message.model),
                served=model,
            )
        if message.adapter_id:
            check_adapter_id(message.adapter_id, model)
        limits = self._settings.router
        check_stop_strings(message.sampling.stop_sequences, limits.max_stop_strings, limits.max_stop_bytes)
        sampling = wire.sampling_params(message.sampling)
        if message.HasField("true_output_tokens") and message.true_output_tokens < 1:
            raise InvalidRequest("true_output_tokens must be at least 1, got 0", field="true_output_tokens", value=0)
        tenant_id = self._access.tenant(caller, message.tenant_id)
        check_use(caller, message.adapter_id, sampling.max_new_tokens, 0)
        prompt_token_ids = await self._prompt_token_ids(message, sampling.max_new_tokens)
        check_use(caller, message.adapter_id, sampling.max_new_tokens, len(prompt_token_ids))
        return Request(
            request_id=message.request_id or uuid4().hex,
            adapter_id=message.adapter_id,
            tenant_id=tenant_id,
            prompt_token_ids_u32=u32.pack(prompt_token_ids),
            sampling=sampling,
            stop_token_sequences=await self._stop_token_sequences(sampling.stop_sequences),
            seed=message.seed if message.HasField("seed") else random.getrandbits(64),
            true_output_tokens=message.true_output_tokens,
            key=caller if self._access.counts else None,
        )

    async def _prompt_token_ids(self, message: router_pb2.GenerateRequest, max_new_tokens: int) -> Sequence[int]:
        kind = message.WhichOneof("prompt")
        max_req_input_len = self._settings.scheduler.max_req_input_len
        if kind == "token_ids" and message.token_ids.ids:
            check_prompt_tokens(len(message.token_ids.ids), max_new_tokens, max_req_input_len)
            token_ids = array("I", message.token_ids.ids)
            check_token_ids("token_ids", token_ids, self._tokenizer.vocab_size)
            return token_ids
        if kind == "text" and (text := message.text):
            check_text("text", text, self._tokenizer, max_req_input_len)
            encoded = await encode_prompt(self._tokenizer, text)
            check_prompt_tokens(len(encoded), max_new_tokens, max_req_input_len)
            return encoded
        raise InvalidRequest("prompt is empty; give text or token_ids", field="prompt")

    async def _stop_token_sequences(self, stop_strings: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        if not stop_strings:
            return ()
        if sum(map(len, stop_strings)) > _LONG_TEXT_CHARACTERS:
            return await asyncio.to_thread(stop_token_sequences, stop_strings, self._tokenizer)
        return stop_token_sequences(stop_strings, self._tokenizer)


async def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a prompt; a long one does not hold the event loop."""
    if len(text) > _LONG_TEXT_CHARACTERS:
        return await asyncio.to_thread(tokenizer.encode_prompt, text)
    return tokenizer.encode_prompt(text)
