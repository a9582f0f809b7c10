"""Builds a simulation's parts: workers from settings of replica and device, requests from a workload."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from lorrery.loadgen.workload.prompts import output_seed, prompt_token_ids
from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter
from lorrery.simulator.request import SimulatedRequest
from lorrery.simulator.worker import SimulatedWorker
from lorrery.vocabulary.finish_reason import FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.output import Ending, LengthModel, Sampling, ending, sequence_seed
from lorrery.worker.device.steptime import StepTimeModel

_NO_TOKENS = np.empty(0, np.uint32)


def build_workers(
    count: int,
    settings: ReplicaSettings,
    step_time: StepTimeModel,
    make_replica: Callable[[ReplicaSettings], Replica] = build_replica,
    *,
    shard: int = 0,
) -> list[SimulatedWorker]:
    """Make workers that are all alike.

    Args:
        count: how many.
        settings: of each replica.
        step_time: of each GPU.
        make_replica: builds a replica, with caches and adapter loads as wanted.
        shard: which scheduler they belong to.
    """
    return [SimulatedWorker(f"worker-{n}", lambda: make_replica(settings), step_time, shard) for n in range(count)]


def build_requests(
    workload: Iterable[WorkloadRequest],
    model: str,
    adapters: Mapping[str, Adapter],
    *,
    natural_length: LengthModel | None = None,
    seed: int = 0,
    with_prompts: bool = False,
    ignore_eos: bool = True,
    max_new_tokens: int | None = None,
) -> Iterator[tuple[int, SimulatedRequest]]:
    """Turn a workload into arrivals: (time in picoseconds, request).

    Args:
        workload: in order of time.
        model: base model's name; with a length model it enters the lengths.
        adapters: by id, of every adapter that the workload names.
        natural_length: draws where outputs end, not above the workload's lengths; None: exactly there.
        seed: of prompts and outputs.
        with_prompts: make the prompts' token ids, for prefix caches.
        ignore_eos: requests ask for exactly their true length; otherwise the model ends there by itself.
        max_new_tokens: without `ignore_eos`, the limit that requests name, where the true length is not above it.
    """
    for request in workload:
        at_ps = round(request.at_seconds * PS_PER_SECOND)
        tokens = request.output_tokens
        most = tokens if ignore_eos or max_new_tokens is None else max(max_new_tokens, tokens)
        if natural_length is not None:
            end = _drawn_end(request, model, natural_length, seed)
        else:
            end = Ending(tokens, FinishReason.LENGTH if ignore_eos else FinishReason.EOS)
        adapter = None if request.adapter_id is None else adapters[request.adapter_id]
        yield (
            at_ps,
            SimulatedRequest(
                request.index,
                request.prompt_tokens,
                most,
                at_ps,
                end,
                adapter,
                request.tenant_id,
                array("I", prompt_token_ids(request, seed).tobytes()) if with_prompts else (),
            ),
        )


def _drawn_end(request: WorkloadRequest, model: str, length_model: LengthModel, seed: int) -> Ending:
    drawn = sequence_seed(model, request.adapter_id or "", output_seed(request, seed))
    sampling = Sampling(drawn, request.output_tokens)
    return ending(drawn, sampling, request.prompt_tokens, _NO_TOKENS, length_model)
