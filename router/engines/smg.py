"""What the two protocols of the gateway smg share; their messages are in the package `smg-grpc-proto`."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import common_pb2

from lorrery.router.engines.generation import Output
from lorrery.router.engines.load import Load
from lorrery.router.engines.tokenizer_files import archive, chunks
from lorrery.v1 import router_pb2

NO_EMBEDDINGS = "the model is a mock without embeddings"
NO_PROFILER = "there is no GPU to profile; the metrics are at router.metrics"
NO_FLUSH = "blocks that nobody uses are evicted as room is needed; start the scheduler again for an empty cache"


async def tokenizer_chunks(folder: Path) -> AsyncIterator[Any]:
    """Yield the archive of a tokenizer in chunks."""
    for piece, digest in chunks(await archive(folder)):
        yield common_pb2.GetTokenizerChunk(data=piece, sha256=digest)


def add_logprobs(message: Any, token_ids: Any, logprobs: Any) -> None:
    """Add the log-probabilities of tokens to a message's `output_logprobs`."""
    for token_id, one in zip(token_ids, logprobs, strict=True):
        message.token_logprobs.append(one.logprob)
        message.token_ids.append(token_id)
        message.top_logprobs.add(values=one.top_logprobs, token_ids=one.top_token_ids)


def chunk_of(output: Output, news: router_pb2.GenerateResponse) -> dict[str, Any]:
    """Return the fields of a chunk: the new tokens, and the total so far."""
    return {
        "token_ids": news.token_ids,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": len(output.token_ids),
        "index": output.index,
    }


def complete_of(output: Output, stop: int | str | None) -> dict[str, Any]:
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
