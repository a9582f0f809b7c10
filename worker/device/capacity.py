"""What a replica holds, and how long its steps take: arithmetic, without arrivals and without a scheduler.

    ITL(b)   = a decode step of b sequences, each at the mean context P + O/2
    TTFT     = the steps of one prompt alone
    KV       = P + O tokens of a stream, or ceil((P + O - 1) / block size) blocks
    requests = max over b, m of m / P / (step(b decodes, m tokens of prompts) + (m O / (P b) - 1) step(b decodes))

P and O are mean lengths. The last line bounds what any schedule can do, in requests/s: b streams, which hold a prompt
and half an answer each, decode without waiting, some steps compute m tokens of prompts as well, up to their budget, and
all name one adapter (placement can bring that about). What a replica really serves comes from the simulator
(`simulator.plan`).

The limit of a stream is the largest share of its time: arithmetic, memory traffic (weights, KV cache), all-reduce over
GPUs, adapters, fixed costs (kernels' constants, the CPU), the front end, or the wait for others.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import ceil

import numpy as np
import numpy.typing as npt

from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.basis import Ground, grounds, slow_kernels
from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, PrefillChunk, StepCost
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.lora import adapter_bytes
from lorrery.worker.device.steptime import StepTimeModel

WAITS, FRONT_END = "waiting", "front end"
PARTS = ("compute", "memory bandwidth", "all-reduce", "adapters", "fixed costs", "whole step")
"""Parts of a step's time; a model without parts has the last one only."""

Seconds = npt.NDArray[np.float64]
"""Shape (parts,): seconds by part."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests that a deployment is to serve.

    Attributes:
        prompt: least and most tokens of a prompt, uniform between them.
        output: of an answer, likewise; at least 2.
        num_adapters: named by requests; 0: the base model.
        ranks: adapter i has rank `ranks[i % len(ranks)]`.
        exponent: Zipf's, of the adapters' shares; 0: all alike.
    """

    prompt: tuple[int, int]
    output: tuple[int, int]
    num_adapters: int = 0
    ranks: Sequence[int] = (16,)
    exponent: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Mean prompt, rounded."""
        return sum(self.prompt) // 2

    @property
    def output_tokens(self) -> int:
        """Mean answer, rounded."""
        return sum(self.output) // 2

    @property
    def adapters_of_rank(self) -> dict[int, int]:
        """Number of adapters of each rank that occurs."""
        whole, more = divmod(self.num_adapters, len(self.ranks))
        counts = Counter[int]()
        for index, rank in enumerate(self.ranks[: self.num_adapters]):
            counts[rank] += whole + (index < more)
        return counts

    @property
    def shares(self) -> Seconds:
        """Shape (adapters,): of the requests, most popular first."""
        weights: Seconds = np.arange(1, self.num_adapters + 1, dtype=np.float64) ** -self.exponent
        shares: Seconds = weights / weights.sum()
        return shares

    def lora(self, num_sequences: int, num_tokens: int | None = None) -> LoraWork:
        """Return the adapters of a step: as many distinct ones as are expected.

        Args:
            num_sequences: in the step.
            num_tokens: total; None: one per sequence.
        """
        if not self.num_adapters:
            return NO_LORA
        distinct = max(1, round(float(np.sum(1 - (1 - self.shares) ** num_sequences))))
        ranks = islice(cycle(self.ranks), distinct)
        each, more = divmod(num_sequences if num_tokens is None else num_tokens, distinct)
        return LoraWork.of([(rank, each + (index < more)) for index, rank in enumerate(ranks)])


@dataclass(frozen=True, slots=True)
class Room:
    """How much a replica holds and computes at once, as far as settings limit it.

    Attributes:
        kv_pool_tokens: of the KV pool; None: as many as fit.
        block_size: tokens in a block of the pool; None: it is counted in tokens.
        max_sequences: most running sequences; None: as many as the pool holds.
        step_tokens: budget of a step with prompts; None: none.
        adapter_places: most adapters on the GPU at once; None: all.
    """

    kv_pool_tokens: int | None = None
    block_size: int | None = None
    max_sequences: int | None = None
    step_tokens: int | None = None
    adapter_places: int | None = None


_ANY_ROOM = Room()
_FINER = 1.1
"""Ratio of the numbers of sequences at which the bound is looked at."""
_PROMPTS_AT_ONCE = 8
"""In a step without a budget."""


class Capacity:
    """The formulas above for one deployment.

    Args:
        deployment: model, GPUs and engine.
        step_time: model of a step's duration.
        workload: to be served.
        room: of its KV pool and steps.

    Attributes:
        adapter_bytes: of the adapters on the GPU, or of their places.
        adapter_places: for adapters on the GPU; None: enough for all.
        fitting_kv_tokens: that fit in the memory left by weights and adapters.
        kv_pool_tokens: of the KV pool.
        block_size: tokens in a block of it; None: it is counted in tokens.
        stream_kv_tokens: that a stream takes of it in the end, in whole blocks.
        fitting_streams: streams that the pool holds.
        running_streams: streams that may run at once, by pool and settings.

    Raises:
        CatalogueError: the model does not fit; the message shows the sum.
    """

    def __init__(
        self, deployment: Deployment, step_time: StepTimeModel, workload: Workload, room: Room = _ANY_ROOM
    ) -> None:
        self.deployment, self.workload, self.step_time = deployment, workload, step_time
        self.adapter_places = room.adapter_places
        beside = bytes_of_adapters(deployment, workload, room.adapter_places)
        self.adapter_bytes = beside + deployment.reserved_bytes
        self.fitting_kv_tokens = deployment.kv_pool_tokens(beside)
        self.kv_pool_tokens = self.fitting_kv_tokens if room.kv_pool_tokens is None else room.kv_pool_tokens
        tokens = workload.prompt_tokens + workload.output_tokens
        self.block_size = block = room.block_size
        # A paged pool never holds the last token produced; S-LoRA's rule charges for it.
        self.stream_kv_tokens = tokens if block is None else ceil((tokens - 1) / block) * block
        self.fitting_streams = self.kv_pool_tokens // (block or 1) * (block or 1) // self.stream_kv_tokens
        limit = self.fitting_streams if room.max_sequences is None else room.max_sequences
        self.running_streams = min(self.fitting_streams, limit)
        self._step_tokens, self._max_sequences = room.step_tokens, room.max_sequences
        self._reads_lengths = getattr(step_time, "reads_decode_lengths", True)

    @property
    def front_end_requests(self) -> float:
        """The most requests per second that the front end takes; infinite without one."""
        return self.deployment.front_end.requests_per_second(self.workload.prompt_tokens)

    @property
    def grounds(self) -> list[Ground]:
        """Basis of its figures."""
        return grounds(self.deployment, self.step_time.name, getattr(self.step_time, "account", ""))

    @property
    def of_kernels(self) -> bool:
        """Whether step times come from kernel and host models, not from a profile or a formula."""
        return self.step_time.name == "roofline"

    @property
    def slow_kernels(self) -> list[str]:
        """Kernels that are slower than those of a wider type, in words."""
        return slow_kernels(self.deployment, self.step_time.name)

    def unqueued_ttft(self, prompt_tokens: int | None = None) -> float:
        """Return the seconds of one prompt's steps, alone on the GPU and without waiting."""
        return float(self._alone(prompt_tokens or self.workload.prompt_tokens).sum())

    def itl(self, concurrency: int) -> float:
        """Return the seconds of one decode step of `concurrency` sequences."""
        return float(self._step(concurrency, 0, 0).sum())

    def most_requests(self, itl: float | None = None) -> float:
        """Return the requests per second that no schedule exceeds.

        Args:
            itl: seconds; only numbers of sequences whose decode step alone takes no longer count. None: all.
        """
        prompt, output = self.workload.prompt_tokens, self.workload.output_tokens
        # In the mean over its life a stream holds its prompt and half its output.
        most = int(self.kv_pool_tokens / (prompt + output / 2))
        if self._max_sequences is not None:
            most = min(most, self._max_sequences)
        best, streams = 0.0, 1
        while streams <= most:
            if itl is not None and float(self._step(streams, 0, 0, alike=True).sum()) > itl:
                break
            best = max(best, self._served(streams))
            streams = most if streams < most < _FINER * streams else max(int(_FINER * streams), streams + 1)
        return min(best, self.front_end_requests)

    def _served(self, streams: int) -> float:
        """Return the most requests per second of so many streams: prompts in some steps, the others decode alone."""
        prompt, output = self.workload.prompt_tokens, self.workload.output_tokens
        even = max(round(streams * prompt / output), 1)
        budget = max(_PROMPTS_AT_ONCE * prompt if self._step_tokens is None else self._step_tokens - streams, 1)
        alone, best, new_tokens = float(self._step(streams, 0, 0, alike=True).sum()), 0.0, min(even, budget)
        while new_tokens <= budget:
            decodes = max(new_tokens * output / (prompt * streams), 1.0)  # steps in which these prompts' answers come
            seconds = float(self._step(streams, new_tokens, 0, alike=True).sum()) + (decodes - 1) * alone
            best = max(best, min(new_tokens / prompt, decodes * streams / output) / seconds)
            new_tokens = budget if new_tokens < budget < 2 * new_tokens else 2 * new_tokens
        return best

    def shares_of(self, ttft: float, tpot: float, decoding: int) -> Mapping[str, float]:
        """Return the shares of a stream's life by part, given its mean seconds to the first token and per further one.

        Args:
            ttft: to the first token.
            tpot: per further token.
            decoding: sequences in a decode step, in the mean.
        """
        alone, step = self._alone(self.workload.prompt_tokens), self._step(decoding, 0, 0)
        own = self.deployment.front_end.work_ps(self.workload.prompt_tokens) / PS_PER_SECOND
        # Beyond a step of their own, decodes wait for the prompts of others.
        further = step * min(1.0, tpot / float(step.sum())) + alone / alone.sum() * max(0.0, tpot - float(step.sum()))
        first = alone * min(1.0, ttft / float(alone.sum()))
        gaps = self.workload.output_tokens - 1
        life = ttft + gaps * tpot
        found = dict(zip(PARTS, ((first + gaps * further) / life).tolist(), strict=True))
        front = min(own, ttft - float(first.sum()))
        found |= {FRONT_END: front / life, WAITS: (ttft - front - float(first.sum())) / life}
        return {part: share for part, share in found.items() if share > 0}

    def _alone(self, prompt_tokens: int) -> Seconds:
        """Return the seconds of a prompt alone, in pieces of a step's budget."""
        most = prompt_tokens if self._step_tokens is None else self._step_tokens
        past = range(0, prompt_tokens, most)
        total: Seconds = np.sum([self._step(0, min(most, prompt_tokens - start), start) for start in past], axis=0)
        return total

    def _step(self, num_decodes: int, new_tokens: int, past_tokens: int, *, alike: bool = False) -> Seconds:
        """Return the seconds of a step by `PARTS`: decodes, and a piece of one prompt; `alike`: of a single adapter."""
        cost = self._cost(num_decodes, new_tokens, past_tokens, alike=alike)
        # Decode attention reads the cache, prefill attention computes.
        reads = min(cost.attention, self._cost(num_decodes, 0, 0, alike=alike).attention) if num_decodes else 0
        picoseconds = (
            cost.compute + cost.attention - reads,
            cost.memory + reads,
            cost.all_reduce,
            cost.lora,
            cost.kernel + cost.host,
            cost.whole,
        )
        return np.array(picoseconds, np.float64) / PS_PER_SECOND

    def _cost(self, num_decodes: int, new_tokens: int, past_tokens: int, *, alike: bool) -> StepCost:
        work = self.workload
        kv = work.prompt_tokens + work.output_tokens // 2
        num_prompts = 1 if new_tokens else 0
        if not num_decodes and work.num_adapters:  # a prompt alone: the worst case
            lora = LoraWork.of([(max(work.adapters_of_rank), new_tokens)])
        elif alike and work.num_adapters:
            lora = LoraWork.of([(min(work.adapters_of_rank), num_decodes + new_tokens)])
        else:
            lora = work.lora(num_decodes + num_prompts, num_decodes + new_tokens)
        chunks = (PrefillChunk(new_tokens, past_tokens, samples=True),) if new_tokens else ()
        lengths = (kv,) * num_decodes if new_tokens and self._reads_lengths else ()
        return self.step_time.step_cost(
            Batch(chunks, num_decodes, num_decodes * kv, kv if num_decodes else 0, lora, lengths)
        )


def bytes_of_adapters(deployment: Deployment, workload: Workload, places: int | None = None) -> int:
    """Return the bytes of all adapters, or of the largest that have places; 0 if memory is set aside for places."""
    if deployment.lora.reserved_rank:
        return 0
    targets, left = deployment.lora.targets, workload.num_adapters if places is None else places
    total = 0
    for rank, count in sorted(workload.adapters_of_rank.items(), reverse=True):
        total += min(count, left) * adapter_bytes(deployment.model, rank, targets)
        left -= min(count, left)
    return total
