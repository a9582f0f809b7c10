"""What a deployment can serve, by arithmetic on step times: no queue, no arrival process, no scheduler.

b streams run at once, each of P prompt and O output tokens, and start evenly spread. A prompt is one prefill step that
stalls the others, so that a stream meets b - 1 foreign prefills while it decodes:

    TTFT    = prefill(P)                                             without queueing
    ITL     = decode step of b sequences, each at the mean context P + O/2
    TPOT    = ITL + (b - 1) * TTFT / (O - 1)                         the stalls spread over the tokens
    E2E     = TTFT + (O - 1) * TPOT
    stream  = O / E2E       in all = b * stream                      tokens/s
    KV      = b * (P + O) tokens at worst

What limits a point is the largest share of b prefills and O - 1 decode steps: arithmetic, memory traffic (weights, KV
cache), sums over GPUs, adapters, or fixed costs (kernels' constants, the CPU); and KV space if no further stream fits.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import ceil

from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.basis import Ground, grounds
from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, PrefillChunk
from lorrery.worker.device.cost import StepCost
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.lora import adapter_bytes
from lorrery.worker.device.steptime import StepTimeModel

KV_SPACE = "KV space"


@dataclass(frozen=True, slots=True)
class Workload:
    """What every stream asks.

    Attributes:
        prompt_tokens: of each prompt.
        output_tokens: of each answer, at least 2.
        num_adapters: that streams name, each equally often; 0: the base model.
        ranks: adapter i has rank `ranks[i % len(ranks)]`.
    """

    prompt_tokens: int
    output_tokens: int
    num_adapters: int = 0
    ranks: Sequence[int] = (16,)

    @property
    def adapters_of_rank(self) -> dict[int, int]:
        """How many adapters each rank has that any has."""
        whole, more = divmod(self.num_adapters, len(self.ranks))
        counts = Counter[int]()
        for index, rank in enumerate(self.ranks[: self.num_adapters]):
            counts[rank] += whole + (index < more)
        return counts

    def lora(self, num_sequences: int) -> LoraWork:
        """Return the adapters of a decode step: the expected number of distinct ones, N (1 - (1 - 1/N)^b)."""
        if not self.num_adapters:
            return NO_LORA
        distinct = max(1, round(self.num_adapters * (1 - (1 - 1 / self.num_adapters) ** num_sequences)))
        ranks = islice(cycle(self.ranks), distinct)
        each, more = divmod(num_sequences, distinct)
        return LoraWork.of((rank, each + (index < more)) for index, rank in enumerate(ranks))


@dataclass(frozen=True, slots=True)
class Point:
    """A deployment under `concurrency` streams; times in seconds, rates per second. Nothing here waits in a queue."""

    concurrency: int
    unqueued_ttft: float
    itl: float
    tpot: float
    e2e: float
    stream_tokens: float
    total_tokens: float
    requests: float
    kv_ratio: float
    limit: str
    shares: dict[str, float]


class Capacity:
    """The formulas above for one deployment.

    Args:
        deployment: what serves.
        step_time: how long its steps take.
        workload: what every stream asks.
        kv_pool_tokens: of the KV pool; None: as many as fit.

    Attributes:
        adapter_bytes: of all adapters.
        fitting_kv_tokens: that the memory left by weights and adapters holds.
        kv_pool_tokens: of the KV pool.
        max_concurrency: streams that the pool holds.

    Raises:
        CatalogueError: the model does not fit; the message shows the sum.
    """

    def __init__(
        self, deployment: Deployment, step_time: StepTimeModel, workload: Workload, kv_pool_tokens: int | None = None
    ) -> None:
        self.deployment, self.workload, self._step_time = deployment, workload, step_time
        targets = deployment.lora.targets
        self.adapter_bytes = sum(
            count * adapter_bytes(deployment.model, rank, targets) for rank, count in workload.adapters_of_rank.items()
        )
        self.fitting_kv_tokens = deployment.kv_pool_tokens(self.adapter_bytes)
        self.kv_pool_tokens = self.fitting_kv_tokens if kv_pool_tokens is None else kv_pool_tokens
        self.max_concurrency = self.kv_pool_tokens // (workload.prompt_tokens + workload.output_tokens)

    @property
    def grounds(self) -> list[Ground]:
        """What its figures rest on."""
        return grounds(self.deployment, self._step_time.name)

    def unqueued_ttft(self, prompt_tokens: int | None = None) -> float:
        """Return the seconds of one prompt's prefill."""
        return self._prefill(prompt_tokens or self.workload.prompt_tokens).total_ps / PS_PER_SECOND

    def itl(self, concurrency: int) -> float:
        """Return the seconds of one decode step of so many sequences."""
        return self._decode(concurrency).total_ps / PS_PER_SECOND

    def point(self, concurrency: int) -> Point:
        """Return what `concurrency` streams get, whether they fit or not."""
        work, gaps = self.workload, self.workload.output_tokens - 1
        prefill, decode = self._prefill(work.prompt_tokens), self._decode(concurrency)
        ttft, itl = prefill.total_ps / PS_PER_SECOND, decode.total_ps / PS_PER_SECOND
        tpot = itl + (concurrency - 1) * ttft / gaps
        e2e = ttft + gaps * tpot
        shares = _shares(prefill, concurrency, decode, gaps)
        full = concurrency + 1 > self.max_concurrency
        return Point(
            concurrency=concurrency,
            unqueued_ttft=ttft,
            itl=itl,
            tpot=tpot,
            e2e=e2e,
            stream_tokens=work.output_tokens / e2e,
            total_tokens=concurrency * work.output_tokens / e2e,
            requests=concurrency / e2e,
            kv_ratio=concurrency * (work.prompt_tokens + work.output_tokens) / self.kv_pool_tokens,
            limit=KV_SPACE if full else max(shares, key=lambda part: shares[part]),
            shares=shares,
        )

    def most_streams(self, at_most: int, ttft: float | None = None, tpot: float | None = None) -> int:
        """Return the largest concurrency that fits and keeps a service level; 0 if not even one stream does.

        Args:
            at_most: never more than this.
            ttft: seconds to the first token, without queueing.
            tpot: seconds per further token, stalls included.
        """
        if ttft is not None and self.unqueued_ttft() > ttft:
            return 0
        low, high = 0, min(at_most, self.max_concurrency)
        while low < high:  # TPOT never falls with concurrency
            middle = (low + high + 1) // 2
            if tpot is None or self.point(middle).tpot <= tpot:
                low = middle
            else:
                high = middle - 1
        return low

    def streams_for(self, total_tokens: float, at_most: int) -> int | None:
        """Return the least concurrency that gives so many tokens per second in all; None if none that fits does."""
        fits = min(at_most, self.max_concurrency)
        return next((b for b in range(1, fits + 1) if self.point(b).total_tokens >= total_tokens), None)

    def _prefill(self, prompt_tokens: int) -> StepCost:
        ranks = self.workload.adapters_of_rank
        lora = LoraWork.of([(max(ranks), prompt_tokens)]) if ranks else NO_LORA
        return self._step_time.step_cost(Batch((PrefillChunk(prompt_tokens, 0, samples=True),), lora=lora))

    def _decode(self, concurrency: int) -> StepCost:
        work = self.workload
        kv = work.prompt_tokens + work.output_tokens // 2
        return self._step_time.step_cost(Batch((), concurrency, concurrency * kv, kv, work.lora(concurrency)))


def replicas_for(requests: float, one_replica: float) -> int:
    """Return how many replicas keep up with a rate when they are never idle, at least 1.

    Args:
        requests: per second, to be served.
        one_replica: that one serves.
    """
    return max(ceil(requests / one_replica - 1e-9), 1)


def _shares(prefill: StepCost, num_prefills: int, decode: StepCost, num_decodes: int) -> dict[str, float]:
    """Return what takes the time, as shares of it; a model that knows no parts has one share."""
    both = (prefill, num_prefills), (decode, num_decodes)

    def total(*parts: str) -> int:
        return sum(times * sum(getattr(cost, part) for part in parts) for cost, times in both)

    # Prefill attention computes, decode attention reads the cache.
    seconds = {
        "compute": total("compute") + num_prefills * prefill.attention,
        "memory bandwidth": total("memory") + num_decodes * decode.attention,
        "all-reduce": total("all_reduce"),
        "adapters": total("lora"),
        "fixed costs": total("kernel", "host"),
        "whole step": total("whole"),
    }
    everything = sum(seconds.values())
    return {part: value / everything for part, value in seconds.items() if value}
