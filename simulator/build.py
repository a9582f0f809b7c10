"""Builds a simulation's parts: workers from settings of replica and device, requests from a workload."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from loadgen.workload.prompts import output_seed, prompt_token_ids
from loadgen.workload.request import WorkloadRequest
from scheduler.core.catalogue import ReplicaSettings, build_replica
from scheduler.core.replica import Replica
from scheduler.core.sequence import Adapter, Sequence
from simulator.engine import SimulatedRequest, SimulatedWorker
from worker.device.gpu import MockGpu
from worker.device.output import LengthModel, Sampling, ending, sequence_seed
from worker.device.rows import DeviceSequence
from worker.device.steptime import StepTimeModel

PS_PER_SECOND = 10**12


def build_workers(
    count: int,
    settings: ReplicaSettings,
    step_time: StepTimeModel,
    make_replica: Callable[[ReplicaSettings], Replica] = build_replica,
) -> list[SimulatedWorker]:
    """Make workers that are all alike.

    Args:
        count: how many.
        settings: of each replica.
        step_time: of each GPU.
        make_replica: builds a replica, with caches and adapter loads as wanted.
    """
    return [SimulatedWorker(f"worker-{n}", make_replica(settings), MockGpu(step_time)) for n in range(count)]


def build_requests(
    workload: Iterable[WorkloadRequest],
    model: str,
    adapters: dict[str, Adapter],
    length_model: LengthModel,
    *,
    seed: int = 0,
    with_prompts: bool = False,
) -> Iterator[tuple[int, SimulatedRequest]]:
    """Turn a workload into arrivals: (time in picoseconds, request).

    Args:
        workload: in order of time.
        model: base model's name; enters the token ids.
        adapters: by id, of every adapter that the workload names.
        length_model: of the device; a workload's true lengths come before it.
        seed: of prompts and outputs.
        with_prompts: make the prompts' token ids, for prefix caches.
    """
    for request in workload:
        at_ps = round(request.at_seconds * PS_PER_SECOND)
        adapter = None if request.adapter_id is None else adapters[request.adapter_id]
        sequence = Sequence(
            handle=request.index,
            prompt_tokens=request.prompt_tokens,
            max_new_tokens=request.output_tokens,
            arrived_ps=at_ps,
            adapter=adapter,
            tenant_id=request.tenant_id,
            prompt_token_ids=prompt_token_ids(request, seed).tolist() if with_prompts else (),
        )
        yield at_ps, SimulatedRequest(sequence, _device(request, model, adapter, length_model, seed))


def _device(
    request: WorkloadRequest, model: str, adapter: Adapter | None, length_model: LengthModel, seed: int
) -> Callable[[int], DeviceSequence]:
    def join(produced_tokens: int) -> DeviceSequence:
        drawn = sequence_seed(model, request.adapter_id or "", output_seed(request, seed))
        sampling = Sampling(drawn, request.output_tokens, true_output_tokens=request.output_tokens)
        produced = np.zeros(produced_tokens, np.uint32)
        end = ending(drawn, sampling, request.prompt_tokens, produced, length_model)
        name, rank = ("", 0) if adapter is None else (adapter.adapter_id, adapter.rank)
        return DeviceSequence(
            request.index, request.prompt_tokens, produced_tokens, drawn, end, adapter_id=name, adapter_rank=rank
        )

    return join
