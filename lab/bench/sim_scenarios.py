"""What lab/bench/sim_speed.py simulates: five loads, each with its cluster.

* vidur: 2,000 requests of a Vidur run with that run's batch rules, and step times fitted to its steps
  (../shared/data/vidur_conv_vllm*.csv). Where the files are absent, as many drawn with the same rate and length
  statistics, under the same rules.
* uniform: Poisson arrivals at 10/s, prompts and outputs uniform over 8 ... 512, on one H100 with Llama-3-8B, which runs
  about 29 of them at a time; and the same with outputs twice as long.
* multi-LoRA: S-LoRA's default workload (lengths 8 ... 512, 200 adapters all as popular, ranks 64, 32, 16, 8, 32 places
  on the GPU) on one A10G with Llama-2-7B, under req_queue and S-LoRA's loop, at 4 % more than it can serve: the queue
  only grows.
* mooncake: the conversation trace as it is, bursts included, on four H100s with Llama-3-8B, chunked prefill, paged KV
  memory, block caches, and placement by prefix. The committed excerpt where ../shared is absent.
* fleet: the same prompts over 200 adapters (each has its prefixes to itself) on sixteen H100s with 32 places for
  adapters each, placed by predicted finish, which weighs load, cached prefix, and how long the adapter's load takes.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.bench.bare_sim import BareCost
from lorrery.loadgen.workload.columns import WorkloadColumns
from lorrery.loadgen.workload.popularity import uniform_indices
from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.loadgen.workload.traces import read_requests as read_trace
from lorrery.scheduler.core.adapters.loads import LoadTime, Tier
from lorrery.scheduler.core.protocols import Queue
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter
from lorrery.validation.figures import VIDUR_REQUESTS, VIDUR_STEPS
from lorrery.validation.padded_fifo import PaddedFifo
from lorrery.validation.vidur import BatchRules, read_requests
from lorrery.worker.build import read_catalogue, read_steps_file
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.fitted import Fitted
from lorrery.worker.device.lora import adapter_bytes, load_ps
from lorrery.worker.device.roofline import Roofline
from lorrery.worker.device.steptime import StepTimeModel

PROJECT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("LORRERY_SHARED") or PROJECT.parent / "shared") / "data"
EXCERPT = PROJECT / "deploy" / "traces" / "mooncake_conversation_excerpt.jsonl"

HOST_GB_PER_SECOND, DISK_GB_PER_SECOND = 24.0, 2.0
MULTI_LORA_RATE = 1.45
RANKS = (64, 32, 16, 8)
NUM_ADAPTERS = 200

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Columns:
    """A workload by column, in order of time.

    Attributes:
        at_seconds: send times.
        prompt_tokens: lengths.
        output_tokens: true lengths.
        adapters: names.
        adapter: of each request the index of its adapter; None: the base model for all.
        hash_ids: ids of the prompts' blocks; None: prompts are lengths only.
    """

    at_seconds: NDArray[np.float64]
    prompt_tokens: Counts
    output_tokens: Counts
    adapters: Sequence[str] = ()
    adapter: NDArray[np.int32] | None = None
    hash_ids: Sequence[Sequence[int] | None] | None = None

    def __len__(self) -> int:
        return len(self.at_seconds)

    def requests(self) -> Iterator[WorkloadRequest]:
        """Yield the requests one by one."""
        drawn = WorkloadColumns(
            np.arange(len(self), dtype=np.int32),
            self.at_seconds,
            self.prompt_tokens,
            self.output_tokens,
            self.adapters,
            self.adapter,
        )
        return iter(drawn) if self.hash_ids is None else _with_hash_ids(drawn, self.hash_ids)


@dataclass(frozen=True)
class Scenario:
    """A load and its cluster.

    Attributes:
        title: what it is, for the report.
        columns: the load.
        model: name of the base model.
        replica: settings of each worker's replica.
        step_time: of each worker's GPU.
        bare_cost: of the bare loop's steps, the same GPU's in a straight line.
        adapters: by name.
        adapter_load_ps: how long an adapter's load takes.
        num_workers: all alike.
        placement: who gets a request.
        make_queue: the queue, where it is not the one that the replica's policy names.
    """

    title: str
    columns: Columns
    model: str
    replica: ReplicaSettings
    step_time: StepTimeModel
    bare_cost: BareCost
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    adapter_load_ps: LoadTime = lambda adapter, tier: 0
    num_workers: int = 1
    placement: str = "least_loaded"
    make_queue: Callable[[ReplicaSettings], Queue] | None = None


def vidur(num_requests: int = 2000) -> Scenario:
    """The Vidur run: prefill first, 4,096 padded tokens and 256 sequences in a batch, 7,424 blocks of 16 tokens."""
    title = "Vidur's run: conversation lengths, 4/s, 256 sequences, 7,424 blocks, fitted step times"
    device = deployment("A100-80-SXM", "Llama-2-7B")
    recorded = read_requests(VIDUR_REQUESTS, num_requests)
    columns = Columns(recorded.arrived, recorded.prompt_tokens, recorded.output_tokens)
    step_time = Fitted(replace(device, steps=read_steps_file(VIDUR_STEPS)))
    rules = BatchRules()
    made = scenario(title, columns, device, rules.replica_settings(), step_time)
    return replace(made, make_queue=lambda settings: PaddedFifo(rules.max_tokens))


def uniform(num_requests: int, output_factor: int = 1) -> Scenario:
    """Uniform lengths at 10/s; outputs may be a whole multiple as long."""
    rng = np.random.default_rng(1)
    at_seconds = np.cumsum(rng.exponential(0.1, num_requests))
    prompts, outputs = rng.integers(8, 513, (2, num_requests))
    outputs = outputs * output_factor
    device = deployment("H100-SXM", "Llama-3-8B")
    replica = ReplicaSettings("fcfs", device.kv_pool_tokens(), 512 + 512 * output_factor)
    title = "uniform 8-512 tokens, 10/s, H100, Llama-3-8B"
    if output_factor != 1:
        title += f", outputs {output_factor} times as long"
    return scenario(title, Columns(at_seconds, prompts, outputs), device, replica)


def multi_lora(num_requests: int) -> Scenario:
    """S-LoRA's default workload over 200 adapters, a little faster than the GPU."""
    rng = np.random.default_rng(2)
    at_seconds = np.cumsum(rng.exponential(1 / MULTI_LORA_RATE, num_requests))
    prompts, outputs = rng.integers(8, 513, (2, num_requests))
    adapters, chosen = _adapters(num_requests, rng)
    device = deployment("A10G", "Llama-2-7B")
    replica = ReplicaSettings("req_queue", device.kv_pool_tokens(), 1024, "slora_loop", max_loras=32)
    return scenario(
        f"{NUM_ADAPTERS} adapters, req_queue, slora_loop, {MULTI_LORA_RATE:g}/s (saturated), A10G, Llama-2-7B",
        Columns(at_seconds, prompts, outputs, list(adapters), chosen),
        device,
        replica,
        adapters=adapters,
        adapter_load_ps=_load_time(device),
    )


def mooncake(num_requests: int | None = None) -> Scenario:
    """Long prompts with shared prefixes."""
    path = SHARED / "mooncake_conversation_first2000.jsonl"
    path = path if path.exists() else EXCERPT
    with path.open(encoding="utf-8") as file:
        workload = read_trace(file, num_requests)
    columns = Columns(
        np.array([request.at_seconds for request in workload]),
        np.array([request.prompt_tokens for request in workload]),
        np.array([request.output_tokens for request in workload]),
        hash_ids=[request.hash_ids for request in workload],
    )
    device = deployment("H100-SXM", "Llama-3-8B")
    replica = ReplicaSettings(
        "fcfs",
        device.kv_pool_tokens(),
        131_072,
        "chunked",
        "paged",
        prefix_cache="blocks",
    )
    title = f"{path.stem}, block caches, 4 x H100, Llama-3-8B, prefix_match"
    return scenario(title, columns, device, replica, num_workers=4, placement="prefix_match")


def fleet(num_requests: int | None = None) -> Scenario:
    """Long prompts with shared prefixes, over adapters, on many workers."""
    one = mooncake(num_requests)
    adapters, chosen = _adapters(len(one.columns), np.random.default_rng(3))
    return replace(
        one,
        title=f"the same, {NUM_ADAPTERS} adapters, 16 x H100, predicted_finish",
        columns=replace(one.columns, adapters=list(adapters), adapter=chosen),
        replica=replace(one.replica, max_loras=32),
        adapters=adapters,
        adapter_load_ps=_load_time(deployment("H100-SXM", "Llama-3-8B")),
        num_workers=16,
        placement="predicted_finish",
    )


def _with_hash_ids(
    workload: Iterable[WorkloadRequest], hash_ids: Iterable[Sequence[int] | None]
) -> Iterator[WorkloadRequest]:
    for request, ids in zip(workload, hash_ids, strict=True):
        request.hash_ids = ids
        yield request


def _adapters(num_requests: int, rng: np.random.Generator) -> tuple[dict[str, Adapter], NDArray[np.int32]]:
    """Return adapters by name, and the index of each request's, all as popular."""
    adapters = {f"lora-{n}": Adapter(f"lora-{n}", RANKS[n % len(RANKS)]) for n in range(NUM_ADAPTERS)}
    return adapters, uniform_indices(NUM_ADAPTERS, num_requests, rng).astype(np.int32)


def _load_time(device: Deployment) -> LoadTime:
    @cache
    def of_rank(rank: int, tier: Tier) -> int:
        disk_gb_per_second = DISK_GB_PER_SECOND if tier is Tier.DISK else None
        return load_ps(device.model, adapter_bytes(device.model, rank), HOST_GB_PER_SECOND, disk_gb_per_second)

    return lambda adapter, tier: of_rank(adapter.rank, tier)


def scenario(
    title: str,
    columns: Columns,
    device: Deployment,
    replica: ReplicaSettings,
    step_time: StepTimeModel | None = None,
    **more: object,
) -> Scenario:
    """Return a load with its cluster; `more`: of its fields."""
    step_time = step_time or Roofline(device)
    return Scenario(title, columns, device.model.name, replica, step_time, straight_line(step_time), **more)  # type: ignore[arg-type]


def deployment(gpu_name: str, model: str) -> Deployment:
    """Return one GPU with a model, as an engine of the present day would use it."""
    catalogue = read_catalogue()
    gpu = catalogue.gpu(gpu_name)
    return Deployment(gpu, catalogue.model(model), engine=catalogue.engine("present-day", gpu))


def straight_line(step_time: StepTimeModel) -> BareCost:
    """Return costs of the bare loop that agree with a model's at three decodes and two prefills."""

    def decode_ps(num_decodes: int, kv_each: int) -> int:
        return step_time.step_ps(Batch((), num_decodes, num_decodes * kv_each, kv_each))

    def prefill_ps(tokens: int) -> int:
        return step_time.step_ps(Batch((PrefillChunk(tokens, 0, samples=True),)))

    few, many, short, long = 8, 32, 256, 1024
    kv_token_ps = (decode_ps(many, long) - decode_ps(many, short)) // (many * (long - short))
    decodes_ps = [decode_ps(num, short) - kv_token_ps * num * short for num in (few, many)]
    sequence_ps = (decodes_ps[1] - decodes_ps[0]) // (many - few)
    prompt_token_ps = (prefill_ps(long) - prefill_ps(short)) // (long - short)
    return BareCost(
        max(prefill_ps(short) - prompt_token_ps * short, 0),
        prompt_token_ps,
        decodes_ps[0] - sequence_ps * few,
        sequence_ps,
        kv_token_ps,
    )
