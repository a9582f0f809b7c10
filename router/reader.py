"""Turns client messages into requests: runs every check that needs no scheduler, then packs the tokens."""

import asyncio
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from uuid import uuid4

from lorrery.router import wire
from lorrery.router.access import Access, check_use
from lorrery.router.checks import (
    check_adapter_id,
    check_cache_salt,
    check_length,
    check_stop_strings,
    check_stop_tokens,
    check_token_ids,
)
from lorrery.router.edges.structured_output.drawing import SharedConstraint
from lorrery.router.keys import ApiKey
from lorrery.router.logprobs import check_top_logprobs
from lorrery.router.output import stop_token_sequences
from lorrery.router.prompt import LONG_TEXT_CHARACTERS, encoded, prompt_token_ids
from lorrery.router.request import Request
from lorrery.router.sampling import SamplingParams, check_least
from lorrery.service.errors import InvalidRequest, Reason, UnknownName
from lorrery.service.names import quoted, why_no_name
from lorrery.service.settings.cluster import Settings
from lorrery.tokenizer.base import Tokenizer
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
