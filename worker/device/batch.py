"""The work of one step on a GPU, and the cost of consecutive steps of a fixed batch.

These records are all that a step-time model sees: counts and lengths, never requests. `scheduler.core` may build them
too (a policy that estimates, a simulator that jumps).

Records built anew for each step are not frozen, though they are never mutated: a frozen record takes three times as
long to build, and a simulation builds millions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.machine_ints import product
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.output import TokenIds


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class PrefillChunk:
    """A run of prompt tokens of one sequence, computed in one step.

    Attributes:
        new_tokens: tokens computed in this step; 0 only where a prefix cache held the whole prompt.
        past_tokens: tokens of the same sequence already in the KV cache (cached prefix, earlier chunks).
        samples: whether the chunk ends the prompt, so that the step gives the sequence a token.
    """

    new_tokens: int
    past_tokens: int
    samples: bool

    def __init__(self, new_tokens: int, past_tokens: int, samples: bool) -> None:
        self.new_tokens = new_tokens
        self.past_tokens = past_tokens
        self.samples = samples


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class LoraWork:
    """A step's LoRA work: sums over the distinct adapters a of the batch, of rank r_a.

    Attributes:
        num_adapters: distinct adapters.
        rank_sum: sum of r_a.
        max_rank: the largest r_a.
        num_tokens: sum of n_a, the tokens of the step that belong to sequences with an adapter.
        rank_tokens: sum of r_a n_a.
    """

    num_adapters: int
    rank_sum: int
    max_rank: int
    num_tokens: int
    rank_tokens: int

    def __init__(
        self,
        num_adapters: int = 0,
        rank_sum: int = 0,
        max_rank: int = 0,
        num_tokens: int = 0,
        rank_tokens: int = 0,
    ) -> None:
        self.num_adapters = num_adapters
        self.rank_sum = rank_sum
        self.max_rank = max_rank
        self.num_tokens = num_tokens
        self.rank_tokens = rank_tokens

    @classmethod
    def of(cls, adapters: Iterable[tuple[int, int]]) -> "LoraWork":
        """Sum up the (rank, tokens) of distinct adapters."""
        pairs = tuple(adapters)
        return cls(
            len(pairs),
            sum(rank for rank, _ in pairs),
            max((rank for rank, _ in pairs), default=0),
            sum(tokens for _, tokens in pairs),
            sum(rank * tokens for rank, tokens in pairs),
        )


NO_LORA: Final = LoraWork()


@mypyc_attr(acyclic=True, free_list_len=1)
@dataclass(slots=True, init=False)
class Batch:
    """One step's work.

    A decode of a sequence whose prompt has p tokens and that has produced j >= 1 of its own finds p + j - 1 tokens in
    the KV cache: the newest token is this step's input, and joins the cache during the step.

    Attributes:
        prefills: prompt chunks.
        num_decodes: sequences past their prompt that get one token.
        decode_kv_tokens: sum over the decodes of the tokens already in the KV cache before the step.
        max_decode_kv_tokens: the largest term of that sum; 0 without decodes.
        lora: the adapters' work.
        decode_lengths: the terms of that sum, in any order. Used only beside prefills, by an engine that computes both
            in one attention kernel; if absent, every decode counts as long as the longest.
    """

    prefills: tuple[PrefillChunk, ...]
    num_decodes: int
    decode_kv_tokens: int
    max_decode_kv_tokens: int
    lora: LoraWork
    decode_lengths: tuple[int, ...]

    def __init__(
        self,
        prefills: tuple[PrefillChunk, ...] = (),
        num_decodes: int = 0,
        decode_kv_tokens: int = 0,
        max_decode_kv_tokens: int = 0,
        lora: LoraWork = NO_LORA,
        decode_lengths: tuple[int, ...] = (),
    ) -> None:
        self.prefills = prefills
        self.num_decodes = num_decodes
        self.decode_kv_tokens = decode_kv_tokens
        self.max_decode_kv_tokens = max_decode_kv_tokens
        self.lora = lora
        self.decode_lengths = decode_lengths


@mypyc_attr(acyclic=True, free_list_len=1)
@dataclass(slots=True, init=False)
class Segment:
    """Times of consecutive decode steps of one batch: step i takes `base_ps + i * slope_ps`.

    That holds from step 0 to before `num_steps`, where something else begins to bound the step's time.
    """

    base_ps: int
    slope_ps: int
    num_steps: int

    def __init__(self, base_ps: int, slope_ps: int, num_steps: int = NEVER) -> None:
        self.base_ps = base_ps
        self.slope_ps = slope_ps
        self.num_steps = num_steps

    def step_ps(self, index: int) -> int:
        """Return the duration of step `index`."""
        return self.base_ps + index * self.slope_ps

    def total_ps(self, num_steps: int) -> int:
        """Return the total duration of the first `num_steps` steps."""
        return num_steps * self.base_ps + self.slope_ps * (num_steps * (num_steps - 1) // 2)


def steps_to_cover(base_ps: int, slope_ps: int, duration_ps: int, limit: int) -> int:
    """Return the fewest of a segment's first steps, from 1 to `limit`, that take at least this long.

    In closed form: the positive root of n base + slope n (n - 1) / 2 >= duration as a guess, then to the exact integer.
    """
    if product(limit, base_ps) + product(slope_ps, limit * (limit - 1) // 2) <= duration_ps or base_ps <= 0:
        return limit
    if slope_ps:
        half = base_ps - slope_ps / 2
        steps = int((sqrt(half * half + 2.0 * slope_ps * max(duration_ps, 0)) - half) / slope_ps)
    else:
        steps = duration_ps // base_ps
    steps = max(1, min(steps, limit))
    total_ps = product(steps, base_ps) + product(slope_ps, steps * (steps - 1) // 2)
    while total_ps < duration_ps and steps < limit:
        total_ps += base_ps + slope_ps * steps
        steps += 1
    while steps > 1 and total_ps - base_ps - slope_ps * (steps - 1) >= duration_ps:
        steps -= 1
        total_ps -= base_ps + slope_ps * steps
    return steps


PARTS = ("compute", "memory", "kernel", "attention", "all_reduce", "lora", "host", "whole")


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step's time in picoseconds by part, and its work.

    Attributes:
        compute: arithmetic of the linear layers and the head, as far as it takes the time, not memory.
        memory: their memory traffic, likewise; elementwise kernels too.
        kernel: constants per kernel of those.
        attention: attention kernels.
        all_reduce: sums over the GPUs of the replica.
        lora: adapters.
        host: the CPU.
        whole: the whole step, for a model without parts.
        flops: floating-point operations of one GPU, a multiplication and an addition as two.
        num_bytes: memory traffic of one GPU: weights, activations of linear layers, KV cache, adapters.
    """

    compute: int = 0
    memory: int = 0
    kernel: int = 0
    attention: int = 0
    all_reduce: int = 0
    lora: int = 0
    host: int = 0
    whole: int = 0
    flops: float = 0.0
    num_bytes: float = 0.0

    def plus_up_to(self, last: "StepCost", num_steps: int) -> "StepCost":
        """Return what steps cost together whose every part grows evenly from the first, this one, to the last."""
        parts_ps = {part: (getattr(self, part) + getattr(last, part)) * num_steps // 2 for part in PARTS}
        flops, num_bytes = (self.flops + last.flops) * num_steps / 2, (self.num_bytes + last.num_bytes) * num_steps / 2
        return StepCost(**parts_ps, flops=flops, num_bytes=num_bytes)

    @property
    def total_ps(self) -> int:
        """The step's duration."""
        linear = self.compute + self.memory + self.kernel
        return linear + self.attention + self.all_reduce + self.lora + self.host + self.whole


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class PrefillWork(PrefillChunk):
    """A prompt chunk, and its sequence's handle."""

    handle: int

    def __init__(self, handle: int, new_tokens: int, past_tokens: int, samples: bool) -> None:
        self.handle = handle
        self.new_tokens = new_tokens
        self.past_tokens = past_tokens
        self.samples = samples


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class StepOutcome:
    """The result of one step, in batch order (the order of joining).

    Attributes:
        handles: shape (num_tokens,), sequences that got a token.
        token_ids: shape (num_tokens,), those tokens.
        finished: (handle, reason) of the sequences that ended with this step; a few without a token.
    """

    handles: NDArray[np.uint32]
    token_ids: TokenIds
    finished: tuple[tuple[int, FinishReason], ...]

    def __init__(
        self, handles: NDArray[np.uint32], token_ids: TokenIds, finished: tuple[tuple[int, FinishReason], ...]
    ) -> None:
        self.handles = handles
        self.token_ids = token_ids
        self.finished = finished
