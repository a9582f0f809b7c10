"""Converts between the wire's messages and the load generator's records; no other module here does."""

import numpy as np

from lorrery.loadgen.reception import Ask, ClusterView, FinishView
from lorrery.loadgen.workload.prompts import output_seed, prompt_token_ids
from lorrery.v1 import router_pb2, types_pb2
from lorrery.v1.router_pb2 import (
    GenerateRequest,
    GenerateResponse,
    GetClusterStatusRequest,
    ListAdaptersRequest,
)
from lorrery.vocabulary.adapters import FIGURES, AdapterFigures, FiguresByAdapter
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.files import count_kinds

__all__ = [
    "GenerateRequest",
    "GenerateResponse",
    "GetClusterStatusRequest",
    "ListAdaptersRequest",
    "adapter_figures",
    "cluster_view",
    "finish_view",
    "generate_request",
]


def generate_request(ask: Ask) -> GenerateRequest:
    """Build the message for one request."""
    request, seed = ask.request, ask.seed
    said = [(turn.request, np.array(turn.reception.token_ids, np.uint32)) for turn in ask.history]
    return GenerateRequest(
        request_id=f"load-{seed}-{request.index}",
        token_ids=router_pb2.TokenIds(ids=prompt_token_ids(request, seed, said).tolist()),
        adapter_id=request.adapter_id or "",
        tenant_id=request.tenant_id,
        sampling=types_pb2.SamplingParams(ignore_eos=ask.ignore_eos, max_new_tokens=ask.max_new_tokens),
        seed=output_seed(request, seed),
        true_output_tokens=request.output_tokens,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def finish_view(finish: router_pb2.Finish) -> FinishView:
    """Read the finish of the last message."""
    usage = finish.usage
    return FinishView(
        reason=FinishReason.of(finish.reason).word,
        completion_tokens=usage.completion_tokens,
        prompt_tokens=usage.prompt_tokens or None,
        cached_tokens=usage.cached_tokens,
        queue_seconds=usage.queue_seconds,
        worker_id=usage.worker_id,
        num_requeues=usage.num_requeues,
        adapter_load_seconds=usage.adapter_load_seconds,
        prefill_seconds=usage.prefill_seconds,
        decode_seconds=usage.decode_seconds,
    )


def adapter_figures(response: router_pb2.GetClusterStatusResponse) -> list[FiguresByAdapter] | None:
    """Read each scheduler's figures of adapters; None: one did not answer, or the caller may not have them."""
    found: list[FiguresByAdapter] = []
    for shard in response.shards:
        if not shard.HasField("adapter_figures"):
            return None
        figures = shard.adapter_figures
        rows = zip(*(getattr(figures, name) for name in FIGURES), strict=True)
        found.append(dict(zip(figures.adapter_ids, map(AdapterFigures.read, rows), strict=True)))
    return found


def cluster_view(response: router_pb2.GetClusterStatusResponse) -> ClusterView | None:
    """Read a cluster's status; None while no shard is connected, because only a shard knows the time scale."""
    shards = [shard for shard in response.shards if shard.connected and shard.time_scale > 0]
    if not shards:
        return None
    return ClusterView(
        model=shards[0].model,
        time_scale=shards[0].time_scale,
        num_shards=len(response.shards),
        num_connected_shards=len(shards),
        max_req_input_len=min((shard.max_req_input_len for shard in shards if shard.max_req_input_len), default=None),
        max_req_total_len=min((shard.max_req_total_len for shard in shards if shard.max_req_total_len), default=None),
        workers=count_kinds((worker.gpu, worker.tensor_parallel) for shard in shards for worker in shard.workers),
    )
