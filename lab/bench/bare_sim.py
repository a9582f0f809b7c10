"""Minimal simulator of continuous batching: a reference for the cost of the full one.

One worker, first come first served. At a step boundary all arrived requests are admitted, in one prefill step during
which running sequences wait; otherwise every running sequence decodes, and a sequence leaves with the step that yields
its last token. The prefill yields the first token, so a request takes `output_tokens - 1` decode steps.

    prefill step = prefill_ps + prompt_token_ps * prompt tokens
    decode step  = decode_ps + sequence_ps * sequences + kv_token_ps * tokens in the KV cache before the step

It consists of one heap of finish steps and a closed form between events (an arrival, a finish). It has no batch limit,
KV memory, adapters, policy or cancellation, and records only the two times of each request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import sqrt


@dataclass(frozen=True, slots=True)
class BareCost:
    """Costs of a step in picoseconds."""

    prefill_ps: int
    prompt_token_ps: int
    decode_ps: int
    sequence_ps: int
    kv_token_ps: int


@dataclass(frozen=True, slots=True)
class BareTimes:
    """Time of each request's first token and of its end, in picoseconds, in request order."""

    first_token_ps: list[int]
    finished_ps: list[int]


def run(
    arrived_ps: Sequence[int], prompt_tokens: Sequence[int], output_tokens: Sequence[int], cost: BareCost
) -> BareTimes:
    """Run requests to completion.

    Args:
        arrived_ps: in ascending order.
        prompt_tokens: of each request.
        output_tokens: of each request, at least 1.
        cost: of a step; `decode_ps` at least 1.
    """
    prefill_ps, prompt_token_ps = cost.prefill_ps, cost.prompt_token_ps
    decode_ps, sequence_ps, kv_token_ps = cost.decode_ps, cost.sequence_ps, cost.kv_token_ps
    num_requests = len(arrived_ps)
    first_token_ps, finished_ps = [0] * num_requests, [0] * num_requests
    ends: list[int] = []  # decode step before which it ends * num_requests + request
    now_ps = decode_steps = kv_tokens = coming = 0
    never_ps = 1 << 200
    arrival_ps = arrived_ps[0] if num_requests else never_ps
    while ends or coming < num_requests:
        if not ends and arrival_ps > now_ps:
            now_ps = arrival_ps
        if arrival_ps <= now_ps:
            first = coming
            tokens = 0
            while arrival_ps <= now_ps:
                tokens += prompt_tokens[coming]
                coming += 1
                arrival_ps = arrived_ps[coming] if coming < num_requests else never_ps
            now_ps += prefill_ps + prompt_token_ps * tokens
            for request in range(first, coming):
                first_token_ps[request] = now_ps
                if output_tokens[request] > 1:
                    heappush(ends, (decode_steps + output_tokens[request] - 1) * num_requests + request)
                    kv_tokens += prompt_tokens[request]
                else:
                    finished_ps[request] = now_ps
            continue
        num_running = len(ends)
        steps = ends[0] // num_requests - decode_steps
        base_ps = decode_ps + sequence_ps * num_running + kv_token_ps * kv_tokens
        slope_ps = kv_token_ps * num_running
        duration_ps = steps * base_ps + slope_ps * (steps * (steps - 1) // 2)
        gap_ps = arrival_ps - now_ps
        if duration_ps > gap_ps and steps > 1:
            # The first boundary at or after the arrival: estimated by a root, then corrected to the exact integer.
            half = base_ps - slope_ps / 2
            steps = min(max(int(2 * gap_ps / (half + sqrt(half * half + 2.0 * slope_ps * gap_ps))), 1), steps)
            duration_ps = steps * base_ps + slope_ps * (steps * (steps - 1) // 2)
            while duration_ps < gap_ps:
                duration_ps += base_ps + slope_ps * steps
                steps += 1
            while steps > 1 and duration_ps - (base_ps + slope_ps * (steps - 1)) >= gap_ps:
                steps -= 1
                duration_ps -= base_ps + slope_ps * steps
        now_ps += duration_ps
        decode_steps += steps
        kv_tokens += steps * num_running
        bound = (decode_steps + 1) * num_requests
        while ends and ends[0] < bound:
            request = heappop(ends) % num_requests
            finished_ps[request] = now_ps
            kv_tokens -= prompt_tokens[request] + output_tokens[request] - 1
    return BareTimes(first_token_ps, finished_ps)
