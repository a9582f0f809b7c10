"""What a deployment can serve, by arithmetic on step times: no arrival process, no scheduler.

b streams run at once, each of P prompt and O output tokens; each sends its next request when the last is answered (a
closed loop, `lorrery simulate -c b`), and they are evenly spread. The mean times of a stream are in `closed_loop`:

    TTFT    = wait for the step under way, and the steps that compute its prompt, with those that join it
    ITL     = decode step of the n <= b sequences that decode at once, each at the mean context P + O/2
    TPOT    = ITL + the prompts of others, per token
    E2E     = TTFT + (O - 1) * TPOT
    stream  = O / E2E       in all = b * stream                      tokens/s
    KV      = b * (P + O) tokens at worst; of paged memory b * ceil((P + O - 1) / block size) blocks

With more adapters than places on the GPU, up to as many streams as places always find one. A share m of the requests
waits for a load of l seconds: in the background up to the next boundary, or, for blocking loads, with all others in the
step that prefills (k and a as in `closed_loop`). The throughput of more streams depends on which requests wait for
which place, and is not computed.

    background    TTFT + m l, beside others m ceil(l / TPOT) TPOT
    blocking      TTFT + l (1 - (1 - m) exp(-k a m))        TPOT + l (1 - exp(-k a m))

A front end of s servers adds its work w on a request to TTFT, and takes no more than s / w requests per second: where
b / E2E would be more, TTFT grows until it is not.

The limit of a point is the largest share of a stream's life: arithmetic, memory traffic (weights, KV cache), all-reduce
over GPUs, adapters, fixed costs (kernels' constants, the CPU) or the front end; and KV space if no further stream fits.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import ceil, exp

import numpy as np

from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.basis import Ground, grounds, slow_kernels
from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, PrefillChunk, StepCost
from lorrery.worker.device.closed_loop import ClosedLoop, Pieces, PromptTurns, Seconds
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.lora import adapter_bytes
from lorrery.worker.device.steptime import StepTimeModel

KV_SPACE = "KV space"
_ADAPTERS = "adapters"
FRONT_END = "front end"
PARTS = ("compute", "memory bandwidth", "all-reduce", _ADAPTERS, "fixed costs", "whole step", FRONT_END)
"""Parts of a step's time; a model without parts has the last one only."""
_OF_ADAPTERS, _OF_FRONT_END = (np.array([float(part == one) for part in PARTS]) for one in (_ADAPTERS, FRONT_END))


@dataclass(frozen=True, slots=True)
class Workload:
    """The request that every stream repeats.

    Attributes:
        prompt_tokens: of each prompt.
        output_tokens: of each answer, at least 2.
        num_adapters: used equally often; 0: the base model.
        ranks: adapter i has rank `ranks[i % len(ranks)]`.
    """

    prompt_tokens: int
    output_tokens: int
    num_adapters: int = 0
    ranks: Sequence[int] = (16,)

    @property
    def adapters_of_rank(self) -> dict[int, int]:
        """Number of adapters of each rank that occurs."""
        whole, more = divmod(self.num_adapters, len(self.ranks))
        counts = Counter[int]()
        for index, rank in enumerate(self.ranks[: self.num_adapters]):
            counts[rank] += whole + (index < more)
        return counts

    def lora(self, num_sequences: int, num_tokens: int | None = None) -> LoraWork:
        """Return the adapters of a step: the expected number of distinct ones, N (1 - (1 - 1/N)^b).

        Args:
            num_sequences: in the step.
            num_tokens: total; None: one per sequence.
        """
        if not self.num_adapters:
            return NO_LORA
        distinct = max(1, round(self.num_adapters * (1 - (1 - 1 / self.num_adapters) ** num_sequences)))
        ranks = islice(cycle(self.ranks), distinct)
        each, more = divmod(num_sequences if num_tokens is None else num_tokens, distinct)
        return LoraWork.of((rank, each + (index < more)) for index, rank in enumerate(ranks))


@dataclass(frozen=True, slots=True)
class Loads:
    """How requests wait for adapters that are not on the GPU.

    Attributes:
        ratio: share of the requests that wait.
        seconds: mean duration of a load.
        blocking: whether the step that prefills waits, and all its sequences with it.
    """

    ratio: float = 0.0
    seconds: float = 0.0
    blocking: bool = False

    def waits(self, tpot: float, per_token: float) -> tuple[float, float]:
        """Return the seconds that loads add to the time to the first token and per further token.

        Args:
            tpot: seconds per token without loads.
            per_token: requests of others that begin meanwhile; 0: nothing else runs.
        """
        if self.blocking:
            none_else = exp(-per_token * self.ratio)
            return self.seconds * (1 - (1 - self.ratio) * none_else), self.seconds * (1 - none_else)
        return self.ratio * (ceil(self.seconds / tpot) * tpot if per_token else self.seconds), 0.0


@dataclass(frozen=True, slots=True)
class Room:
    """How much a replica holds, as far as settings limit it.

    Attributes:
        kv_pool_tokens: of the KV pool; None: as many as fit.
        block_size: tokens in a block of the pool; None: it is counted in tokens.
        max_sequences: most running sequences; None: as many as the pool holds.
        adapter_places: most adapters on the GPU at once; None: all.
        loads: of the adapters without a place.
    """

    kv_pool_tokens: int | None = None
    block_size: int | None = None
    max_sequences: int | None = None
    adapter_places: int | None = None
    loads: Loads = Loads()


_ANY_ROOM = Room()


@dataclass(frozen=True, slots=True)
class Point:
    """A deployment under `concurrency` streams in a closed loop; mean times in seconds, rates per second.

    Attributes:
        concurrency: streams.
        decoding: mean number of them that decode; the others wait or prefill.
        ttft: request to first token.
        itl: a decode step alone.
        tpot: from one token to the next, time for others' prompts included.
        e2e: request to last token.
        stream_tokens: per stream.
        total_tokens: of all streams.
        requests: of all streams.
        kv_ratio: share of the KV pool that they fill at worst.
        limit: the part that takes most of the time, or `KV_SPACE`.
        shares: of the time, by part.
    """

    concurrency: int
    decoding: float
    ttft: float
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
        deployment: model, GPUs and engine.
        step_time: model of a step's duration.
        workload: the request that every stream repeats.
        turns: how prompts and decodes share its steps.
        room: of its KV pool and batch.

    Attributes:
        adapter_bytes: of the adapters on the GPU, or of their places.
        adapter_places: for adapters on the GPU; None: enough for all.
        fitting_kv_tokens: that fit in the memory left by weights and adapters.
        kv_pool_tokens: of the KV pool.
        block_size: tokens in a block of it; None: it is counted in tokens.
        stream_kv_tokens: that a stream takes of it at worst, in whole blocks.
        fitting_streams: streams that the pool holds.
        running_streams: streams that may run at once, by pool and settings.
        max_concurrency: running streams that never wait for an adapter place.

    Raises:
        CatalogueError: the model does not fit; the message shows the sum.
    """

    def __init__(
        self,
        deployment: Deployment,
        step_time: StepTimeModel,
        workload: Workload,
        turns: PromptTurns,
        room: Room = _ANY_ROOM,
    ) -> None:
        self.deployment, self.workload, self.step_time = deployment, workload, step_time
        self.adapter_places = places = room.adapter_places
        beside = bytes_of_adapters(deployment, workload, places)
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
        self.max_concurrency = self.running_streams if places is None else min(self.running_streams, places)
        self._loads = room.loads
        self._reads_lengths = getattr(step_time, "reads_decode_lengths", True)
        self._steps: dict[tuple[int, Pieces], Seconds] = {}
        self._loop = ClosedLoop(self._step, turns, workload.prompt_tokens, workload.output_tokens)

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
        """Return the seconds of one prompt's prefill, alone on the GPU and without waiting."""
        return float(self._loop.alone(prompt_tokens or self.workload.prompt_tokens).sum())

    def itl(self, concurrency: int) -> float:
        """Return the seconds of one decode step of `concurrency` sequences."""
        return float(self._step(concurrency, ()).sum())

    def point(self, concurrency: int) -> Point:
        """Return the figures of `concurrency` streams, whether they fit or not."""
        work, gaps = self.workload, self.workload.output_tokens - 1
        found = self._loop.at(concurrency)
        others = found.decoding / gaps * (concurrency - 1) / concurrency
        to_first, per_token = self._loads.waits(float(found.tpot.sum()), others)
        first, further = found.ttft + to_first * _OF_ADAPTERS, found.tpot + per_token * _OF_ADAPTERS
        first = first + self._front_end(concurrency, float((first + gaps * further).sum())) * _OF_FRONT_END
        life = first + gaps * further
        ttft, tpot, e2e = float(first.sum()), float(further.sum()), float(life.sum())
        shares = {part: float(share) for part, share in zip(PARTS, life / e2e, strict=True) if share > 0}
        full = concurrency + 1 > self.fitting_streams
        return Point(
            concurrency=concurrency,
            decoding=found.decoding,
            ttft=ttft,
            itl=self.itl(max(1, round(found.decoding))),
            tpot=tpot,
            e2e=e2e,
            stream_tokens=work.output_tokens / e2e,
            total_tokens=concurrency * work.output_tokens / e2e,
            requests=concurrency / e2e,
            kv_ratio=concurrency * self.stream_kv_tokens / self.kv_pool_tokens,
            limit=KV_SPACE if full else max(shares, key=lambda part: shares[part]),
            shares=shares,
        )

    def _front_end(self, streams: int, rest: float) -> float:
        """Return the seconds that a request of each of `streams` streams spends in the front end, beside `rest`.

        Alone its own work; where all of them come faster than the servers work, as long as makes the rate theirs.
        """
        cost = self.deployment.front_end
        work = cost.work_ps(self.workload.prompt_tokens) / PS_PER_SECOND
        return max(work, streams * work / cost.servers - rest)

    def most_streams(self, ttft: float | None = None, tpot: float | None = None, most: int | None = None) -> int:
        """Return the largest concurrency that keeps a service level; 0 if not even one stream does.

        Args:
            ttft: seconds to the first token, on average.
            tpot: seconds per further token, on average.
            most: largest concurrency to try; None: `max_concurrency`.
        """

        def keeps(streams: int) -> bool:
            point = self.point(streams)
            return (ttft is None or point.ttft <= ttft) and (tpot is None or point.tpot <= tpot)

        low, high = 0, self.max_concurrency if most is None else most
        while low < high:  # as a rule neither time falls with concurrency
            middle = (low + high + 1) // 2
            if keeps(middle):
                low = middle
            else:
                high = middle - 1
        return low

    def streams_for(self, total_tokens: float) -> int | None:
        """Return the least concurrency with this total rate in tokens per second; None if none that may run has it."""
        most, low, high = self.max_concurrency, 0, 1
        while high < most and self.point(high).total_tokens < total_tokens:
            low, high = high, min(2 * high, most)
        if high > most or self.point(high).total_tokens < total_tokens:
            return None
        while low + 1 < high:
            middle = (low + high) // 2
            if self.point(middle).total_tokens < total_tokens:
                low = middle
            else:
                high = middle
        return high

    def _step(self, num_decodes: int, pieces: Pieces) -> Seconds:
        """Return the seconds of a step by `PARTS`."""
        found = self._steps.get((num_decodes, pieces))
        if found is None:
            found = self._steps[num_decodes, pieces] = self._seconds(num_decodes, pieces)
        return found

    def _seconds(self, num_decodes: int, pieces: Pieces) -> Seconds:
        cost = self._cost(num_decodes, pieces)
        # Decode attention reads the cache, prefill attention computes.
        reads = min(cost.attention, self._cost(num_decodes, ()).attention) if num_decodes else 0
        picoseconds = (
            cost.compute + cost.attention - reads,
            cost.memory + reads,
            cost.all_reduce,
            cost.lora,
            cost.kernel + cost.host,
            cost.whole,
            0,
        )
        return np.array(picoseconds, np.float64) / PS_PER_SECOND

    def _cost(self, num_decodes: int, pieces: Pieces) -> StepCost:
        work = self.workload
        kv = work.prompt_tokens + work.output_tokens // 2
        num_sequences, num_tokens = num_decodes + len(pieces), num_decodes + sum(new for new, _ in pieces)
        lora = work.lora(num_sequences, num_tokens)
        if pieces and num_sequences == 1 and work.num_adapters:  # a prompt alone: the worst case
            lora = LoraWork.of([(max(work.adapters_of_rank), num_tokens)])
        chunks = tuple(PrefillChunk(new, past, samples=True) for new, past in pieces)
        lengths = (kv,) * num_decodes if pieces and self._reads_lengths else ()
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


def replicas_for(requests: float, one_replica: float) -> int:
    """Return how many replicas keep up with a rate when they are never idle, at least 1.

    Args:
        requests: per second, to serve.
        one_replica: requests per second of one replica.
    """
    return max(ceil(requests / one_replica - 1e-9), 1)
