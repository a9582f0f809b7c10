"""Random cases for vLLM's scheduler: the inputs of records of the kind `vllm_scheduler`, by seed.

A case is a configuration and requests in order of arrival, without what the scheduler makes of them; that is recorded
from a vLLM by `vllm_recorder.py`. Case `index` of a seed depends on these two numbers only, so more cases of a seed
begin with the same ones. The families take turns. Each presses one rule of the scheduler: a budget smaller than the
prompts, a pool that runs out, more adapters than fit a batch. Sizes are small: what matters is met within some dozen
steps, and a record can be read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np

Case: TypeAlias = dict[str, Any]
T = TypeVar("T")

MAX_REQUESTS = 60
MAX_ADAPTERS = 7
MAX_GAP = 60
"""Steps between two arrivals, at most; long gaps let the batch drain."""
NUM_GROUPS = 4
"""Groups of requests that share a beginning."""


@dataclass(frozen=True, slots=True)
class Family:
    """What the cases of a family are drawn from. A share is a probability, of a case unless it says of requests.

    Attributes:
        lengths: of `max_model_len`.
        budgets: of `max_num_batched_tokens`.
        batch_sizes: of `max_num_seqs`.
        pool: bounds of the KV pool, in requests of `max_model_len` tokens.
        outputs: tokens of an output, at most, but for the few requests that may go on to `max_model_len`.
        long_prompts: share of requests whose prompt may have any length; others are mostly short.
        whole_prompts: share of cases without chunked prefill.
        caching: share with prefix caching.
        adapters: share with adapters.
        priorities: share under the policy `priority`.
        urgent_late: share of these in which later requests come first, which preempts.
        watermarks: share with a watermark.
        partly_reserved: share without `scheduler_reserve_full_isl`.
        active_limits: share with `max_num_active_seqs`.
        thresholds: share with `long_prefill_token_threshold`.
        asynchronous: share with `async_scheduling`.
        shared: share of requests that begin like others of their group.
        continues: share of requests that continue an earlier one, output included.
        aborts: share of requests that are aborted.
    """

    lengths: tuple[int, ...] = (128, 192, 256, 512, 1024)
    budgets: tuple[int, ...] = (32, 48, 64, 100, 128, 256, 512)
    batch_sizes: tuple[int, ...] = (4, 8, 16, 32, 64)
    pool: tuple[float, float] = (1.0, 6.0)
    outputs: int = 28
    long_prompts: float = 0.1
    whole_prompts: float = 0.0
    caching: float = 0.7
    adapters: float = 0.0
    priorities: float = 0.0
    urgent_late: float = 0.0
    watermarks: float = 0.0
    partly_reserved: float = 0.0
    active_limits: float = 0.0
    thresholds: float = 0.0
    asynchronous: float = 0.0
    shared: float = 0.25
    continues: float = 0.04
    aborts: float = 0.015


_LOOSE = Family(whole_prompts=0.1)
_TIGHT = Family(lengths=(64, 96, 128, 160), pool=(1.0, 1.5), shared=0.35, outputs=48)
FAMILIES = {
    "chunked": _LOOSE,
    "budget": replace(_LOOSE, lengths=(512, 1024, 2048), budgets=(16, 17, 32, 40, 64, 100), long_prompts=0.6),
    "max_num_seqs": replace(_LOOSE, batch_sizes=(1, 3, 4, 6, 8), active_limits=0.5),
    "prefix": replace(_LOOSE, caching=1.0, shared=0.7, adapters=0.5),
    "eviction": replace(_LOOSE, caching=1.0, shared=0.7, pool=(1.0, 2.0)),
    "preemption": replace(_TIGHT, caching=0.85, whole_prompts=0.1, partly_reserved=0.3),
    "preemption_no_cache": replace(_TIGHT, caching=0.0),
    "lora": replace(_LOOSE, adapters=1.0),
    "lora_preemption": replace(_TIGHT, adapters=1.0, shared=0.6, whole_prompts=0.1),
    "priority": replace(_LOOSE, priorities=1.0, whole_prompts=0.0, caching=0.5, adapters=0.5),
    "priority_preemption": replace(_TIGHT, priorities=1.0, urgent_late=0.5),
    "aborts": replace(_LOOSE, aborts=0.35, adapters=0.5),
    "multi_turn": replace(_LOOSE, lengths=(96, 128, 192, 256, 512), caching=1.0, continues=0.55, pool=(1.0, 3.0)),
    "whole_prompts": replace(_LOOSE, whole_prompts=1.0, shared=0.6),
    "never_fits": replace(_TIGHT, pool=(0.3, 0.95), long_prompts=0.2, aborts=0.27),
    "watermark": replace(_LOOSE, lengths=(64, 96, 192, 512), watermarks=1.0, partly_reserved=0.6, pool=(1.0, 3.0)),
    "long_prefill": replace(_LOOSE, budgets=(128, 128, 256, 512), thresholds=1.0, long_prompts=0.6),
    "async": replace(_LOOSE, budgets=(32, 48, 64, 128), whole_prompts=0.0, adapters=0.8, asynchronous=1.0),
    "async_preemption": replace(_TIGHT, asynchronous=1.0, whole_prompts=0.1, partly_reserved=0.5),
    "everything": Family(
        lengths=(64, 128, 192, 512, 1024),
        pool=(1.0, 3.0),
        whole_prompts=0.15,
        adapters=0.5,
        priorities=0.8,
        urgent_late=0.3,
        watermarks=0.3,
        partly_reserved=0.5,
        active_limits=0.2,
        thresholds=0.2,
        shared=0.6,
        aborts=0.03,
    ),
}
"""In the order in which they take turns, which is that of the recorded cases."""


def cases(seed: int, num_cases: int) -> Iterator[Case]:
    """Yield the first cases of a seed: `id`, `config` and `requests`, as a record has them."""
    names = tuple(FAMILIES)
    for index in range(num_cases):
        name = names[index % len(names)]
        draw = _Draw(np.random.default_rng([seed, index]))
        config = _config(FAMILIES[name], draw)
        requests = _requests(FAMILIES[name], config, draw)
        if config["enable_prefix_caching"]:
            _salt(requests, _Draw(np.random.default_rng([seed, index, 1])))
        yield {"id": f"vllm-seed{seed}-{index:04d}-{name}", "config": config, "requests": requests}


class _Draw:
    """Random values as Python's own numbers, which JSON takes."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def chance(self, share: float) -> bool:
        return bool(self._rng.random() < share)

    def one_of(self, values: Sequence[T]) -> T:
        return values[self.between(0, len(values) - 1)]

    def between(self, low: int, high: int) -> int:
        """Draw an integer, both bounds included."""
        return int(self._rng.integers(low, high, endpoint=True))

    def uniform(self, low: float, high: float) -> float:
        return float(self._rng.uniform(low, high))

    def small(self, low: int, high: int) -> int:
        """Draw an integer, both bounds included, evenly over its orders of magnitude."""
        return min(high, int(np.exp(self._rng.uniform(np.log(low), np.log(high + 1)))))


def _config(family: Family, draw: _Draw) -> Case:
    block_size = draw.one_of((8, 16, 16, 16, 16, 16, 32))
    max_model_len = draw.one_of(family.lengths)
    max_num_seqs = draw.one_of(family.batch_sizes)
    chunked = not draw.chance(family.whole_prompts)
    budget = draw.one_of(family.budgets)
    if not chunked and budget < max_model_len:  # vLLM refuses it
        budget = max_model_len + draw.one_of((0, 7, 64, max_model_len // 4))
    blocks_of_longest = -(-max_model_len // block_size)
    blocks = max(2, round(blocks_of_longest * draw.uniform(*family.pool)))
    adapters = draw.chance(family.adapters)
    threshold = draw.one_of((8, 16, 20, 33, 64)) if draw.chance(family.thresholds) else 0
    return {
        "num_gpu_blocks": blocks + 1,
        "block_size": block_size,
        "max_num_seqs": min(max_num_seqs, budget),
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw.chance(family.caching),
        "policy": "priority" if draw.chance(family.priorities) else "fcfs",
        "max_loras": draw.between(1, 4) if adapters else None,
        "long_prefill_token_threshold": threshold,
        "long_prefill_token_threshold_adaptive": threshold > 0 and draw.chance(0.35),
        "scheduler_reserve_full_isl": not draw.chance(family.partly_reserved),
        "watermark": draw.one_of((0.01, 0.05, 0.1, 0.2, 0.3)) if draw.chance(family.watermarks) else 0.0,
        "max_num_active_seqs": draw.between(1, min(max_num_seqs, 5)) if draw.chance(family.active_limits) else None,
        "async_scheduling": draw.chance(family.asynchronous),
    }


def _requests(family: Family, config: Case, draw: _Draw) -> list[Case]:
    longest = config["max_model_len"] - 1
    group_tokens = [draw.between(1, longest // 2) for _ in range(NUM_GROUPS)]
    num_adapters = min(MAX_ADAPTERS, config["max_loras"] + draw.between(0, 4)) if config["max_loras"] else 0
    urgent_late = config["policy"] == "priority" and draw.chance(family.urgent_late)
    pace = draw.one_of((0.05, 0.2, 0.5))
    requests: list[Case] = []
    prompt_tokens: list[int] = []
    step = 0
    for number in range(draw.small(5, MAX_REQUESTS)):
        if number and draw.chance(pace):
            step += draw.small(1, MAX_GAP if draw.chance(0.1) else 8)
        prompt = _prompt(family, config, draw, requests, prompt_tokens, group_tokens)
        num_prompt: int = prompt["own_tokens"] + prompt.get("shared_tokens", 0)
        if "continues" in prompt:
            before = prompt["continues"]
            num_prompt += prompt_tokens[before] + _output_tokens(requests[before], prompt_tokens[before], longest + 1)
        request: Case = {"id": number, "step": step, "prompt": prompt}
        max_tokens = longest + 1 if draw.chance(0.02) else draw.small(1, family.outputs)
        if draw.chance(0.35):
            request["eos_at"] = draw.small(1, min(max_tokens, longest + 1 - num_prompt))
        request["max_tokens"] = max_tokens
        if num_adapters and not draw.chance(0.15):
            request["lora"] = draw.small(1, num_adapters)
        if config["policy"] == "priority":
            request["priority"] = (
                -(number // 4) + draw.between(0, 3) if urgent_late else draw.one_of((0, 0, 1, 2, -1, 5))
            )
        if draw.chance(family.aborts):
            point = "abort_before" if draw.chance(0.6) else "abort_during"
            request[point] = step + draw.small(1, MAX_GAP) - 1
        requests.append(request)
        prompt_tokens.append(num_prompt)
    return requests


def _salt(requests: Sequence[Case], draw: _Draw) -> None:
    """Give some requests of every third case a salt."""
    if draw.chance(1 / 3):
        for request in requests:
            if draw.chance(0.3):
                request["salt"] = draw.one_of(("pepper", "sugar"))


def _prompt(
    family: Family,
    config: Case,
    draw: _Draw,
    requests: Sequence[Case],
    prompt_tokens: Sequence[int],
    group_tokens: Sequence[int],
) -> Case:
    """Draw a prompt that leaves room for an output token at least."""
    longest = config["max_model_len"] - 1
    if requests and draw.chance(family.continues):
        before = draw.between(max(0, len(requests) - 8), len(requests) - 1)
        tokens = prompt_tokens[before] + _output_tokens(requests[before], prompt_tokens[before], longest + 1)
        if tokens < longest:
            return {"continues": before, "own_tokens": draw.small(1, min(longest - tokens, 2 * config["block_size"]))}
    if draw.chance(family.shared):
        group = draw.small(1, NUM_GROUPS) - 1
        shared = group_tokens[group] if draw.chance(0.8) else draw.between(1, group_tokens[group])
        own = min(longest - shared, draw.one_of((0, 0, 1, 1, 2, 3, 5, config["block_size"], 32)))
        return {"shared": group, "shared_tokens": shared, "own_tokens": own}
    return {"own_tokens": _prompt_tokens(family, config, draw)}


def _prompt_tokens(family: Family, config: Case, draw: _Draw) -> int:
    """Draw a length; every fifth is at a border of blocks or of the budget, where rules change."""
    longest: int = config["max_model_len"] - 1
    if draw.chance(family.long_prompts):
        return draw.between(1, longest)
    if draw.chance(0.2):
        unit: int = draw.one_of((config["block_size"], config["block_size"] * 2, config["max_num_batched_tokens"]))
        return max(1, min(longest, unit + draw.between(-1, 1)))
    return draw.small(1, max(1, longest // 2))


def _output_tokens(request: Case, prompt_tokens: int, max_model_len: int) -> int:
    """Return the length of a request's output if nothing aborts it."""
    max_tokens: int = request["max_tokens"]
    eos_at: int = request.get("eos_at", max_tokens)
    return min(max_tokens, eos_at, max_model_len - prompt_tokens)
