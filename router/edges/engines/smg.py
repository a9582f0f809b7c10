"""What the two protocols of the gateway smg share; their messages are in the package `smg-grpc-proto`.

KV events (`SubscribeKvEvents`) are the blocks that the engine's prefix cache stores and removes. Batches are numbered
from 1, without gaps. A subscriber that asks for a sequence number gets the whole cache again from that number on, after
an event that clears everything: no batches are kept.
"""

import time
from collections.abc import AsyncIterator, Mapping
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from smg_grpc_proto.generated import common_pb2

from lorrery.router.edges.engines.engine import Engine, Load, archive, chunks
from lorrery.router.edges.engines.generation import Output, Write, matched_stop
from lorrery.service.network import status
from lorrery.v1 import router_pb2
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary import u32

NO_EMBEDDINGS = "the model is a mock without embeddings"
NO_PROFILER = "there is no GPU to profile; the metrics are at router.metrics"
NO_FLUSH = "blocks that nobody uses are evicted as room is needed; start the scheduler again for an empty cache"


async def tokenizer_chunks(engine: Engine, context: status.Context) -> AsyncIterator[Any]:
    """Yield the archive of the tokenizer's files in chunks."""
    engine.caller(context)
    for piece, digest in chunks(await archive(Path(engine.folder))):
        yield common_pb2.GetTokenizerChunk(data=piece, sha256=digest)


def model_info(engine: Engine, context: status.Context) -> dict[str, Any]:
    """Return the fields of `GetModelInfoResponse`."""
    engine.caller(context)
    return {
        "model_path": engine.folder,
        "tokenizer_path": engine.folder,
        "is_generation": True,
        "served_model_name": engine.served_name,
        "max_context_length": engine.max_model_len,
        "max_req_input_len": engine.settings.scheduler.max_req_input_len,
        "vocab_size": engine.handler.tokenizer.vocab_size,
        "eos_token_ids": [engine.handler.tokenizer.eos_id],
    }


def writer(
    engine: Engine,
    context: status.Context,
    message: router_pb2.GenerateRequest,
    messages: Any,
    *,
    streams: bool,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> Write:
    """Return what writes the outputs of a request: chunks of new tokens if it streams, each output in full at its end.

    Args:
        engine: answers the request.
        context: of the call.
        message: the request.
        messages: the protocol's module of messages.
        streams: whether chunks are wanted.
        fields: further ones of each response.
    """

    async def write(output: Output, news: router_pb2.GenerateResponse) -> None:
        if streams and news.token_ids:
            chunk = messages.GenerateStreamChunk(**_chunk_of(output, news))
            if news.logprobs:
                _add_logprobs(chunk.output_logprobs, news.token_ids, news.logprobs)
            await context.write(messages.GenerateResponse(chunk=chunk, **fields))
        if output.reason is not None:
            stop = matched_stop(engine.handler.tokenizer, output, message.sampling)
            complete = messages.GenerateComplete(**_complete_of(output, stop))
            if output.logprobs:
                _add_logprobs(complete.output_logprobs, output.token_ids, output.logprobs)
            await context.write(messages.GenerateResponse(complete=complete, **fields))

    return write


def _add_logprobs(message: Any, token_ids: Any, logprobs: Any) -> None:
    """Add the log-probabilities of tokens to a message's `output_logprobs`."""
    for token_id, one in zip(token_ids, logprobs, strict=True):
        message.token_logprobs.append(one.logprob)
        message.token_ids.append(token_id)
        message.top_logprobs.add(values=one.top_logprobs, token_ids=one.top_token_ids)


def _chunk_of(output: Output, news: router_pb2.GenerateResponse) -> dict[str, Any]:
    """Return the fields of a chunk: the new tokens, and the total so far."""
    return {
        "token_ids": news.token_ids,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": len(output.token_ids),
        "index": output.index,
    }


def _complete_of(output: Output, stop: int | str | None) -> dict[str, Any]:
    """Return the fields of the last message of an output, with all of its tokens."""
    fields: dict[str, Any] = {
        "output_ids": output.token_ids,
        "finish_reason": output.word,
        "prompt_tokens": output.usage.prompt_tokens,
        "completion_tokens": len(output.token_ids),
        "cached_tokens": output.usage.cached_tokens,
        "index": output.index,
    }
    if isinstance(stop, int):
        fields["matched_token_id"] = stop
    elif stop is not None:
        fields["matched_stop_str"] = stop
    return fields


def load_of(load: Load) -> dict[str, Any]:
    """Return the load fields that both protocols have."""
    return {
        "num_running_reqs": load.num_running,
        "num_waiting_reqs": load.num_waiting,
        "num_total_reqs": load.num_running + load.num_waiting,
        "num_used_tokens": load.kv_tokens,
        "max_total_num_tokens": min(load.max_kv_tokens, 2**31 - 1),
        "token_usage": load.kv_usage,
        "gen_throughput": load.tokens_per_second,
        "utilization": load.num_running / load.max_running if load.max_running else 0.0,
        "max_running_requests": load.max_running,
        "num_waiting_uncached_tokens": load.num_unstarted_tokens,
    }


MEDIUM = "GPU"
RANK = 0
"""There is one engine; its workers are not data-parallel ranks."""


async def subscribe(engine: Engine, request: Any, context: status.Context) -> None:
    """Write batches of KV events, without end."""
    numbers, event_ids = count(max(1, request.start_sequence_number)), count(1)

    async def write(events: pb.KvEvents) -> None:
        batch = common_pb2.KvEventBatch(sequence_number=next(numbers), timestamp=time.time(), dp_rank=RANK)
        for event in events.events:
            _add(batch.events.add(event_id=next(event_ids)), event, events.block_size)
        await context.write(batch)

    await engine.follow_kv_events(context, write)


def _add(message: Any, event: pb.KvEvent, block_size: int) -> None:
    kind = event.WhichOneof("event")
    if kind == "cleared":
        message.cleared.SetInParent()
    elif kind == "removed":
        message.removed.block_hashes.extend(map(_signed, event.removed.block_hashes))
        message.removed.medium, message.removed.tier = MEDIUM, common_pb2.KV_CACHE_TIER_DEVICE
    else:
        _add_stored(message.stored, event.stored, block_size)


def _add_stored(message: Any, stored: pb.BlocksStored, block_size: int) -> None:
    message.medium, message.tier = MEDIUM, common_pb2.KV_CACHE_TIER_DEVICE
    if stored.HasField("parent_block_hash"):
        message.parent_block_hash = _signed(stored.parent_block_hash)
    name = stored.adapter.adapter_id
    if name:
        message.lora_name = name
    tokens = u32.view(stored.token_ids_u32).tolist()
    for index, block_hash in enumerate(stored.block_hashes):
        block = message.blocks.add(block_hash=_signed(block_hash), block_size=block_size)
        block.token_ids.extend(tokens[index * block_size : (index + 1) * block_size])
        if name:
            block.lora_id = stored.adapter.number


def _signed(block_hash: int) -> int:
    """Return a hash in the form of these messages: the same 64 bits, signed."""
    return block_hash - 2**64 if block_hash >= 2**63 else block_hash
