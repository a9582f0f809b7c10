"""Sessions of several turns, and shared prompt prefixes.

A session is a conversation: the prompt of turn k + 1 has the whole history (its shared part, all earlier turns and
their answers) and its own words. It is sent when the answer to turn k has ended and the think time has passed, so the
loop is closed within a session: slower answers mean fewer requests.

    prompt tokens(k) = shared tokens + sum over j < k of (own tokens(j) + output tokens(j)) + own tokens(k)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.request import Turn, WorkloadRequest, sessions

__all__ = ["ChatShape", "chat", "session_requests", "share_prefixes"]


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Distributions of sessions.

    Attributes:
        turns: number of turns, uniform over [low, high].
        input_range: own tokens of a turn, uniform over [low, high].
        output_range: likewise for its output.
        think_seconds: mean of the exponential think times; 0: none.
    """

    turns: tuple[int, int]
    input_range: tuple[int, int]
    output_range: tuple[int, int]
    think_seconds: float

    def __post_init__(self) -> None:
        for name in ("turns", "input_range", "output_range"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"{name} is {low}:{high}; it must begin at 1 or more and not be empty")


def chat(at_seconds: npt.NDArray[np.float64], shape: ChatShape, rng: np.random.Generator) -> list[WorkloadRequest]:
    """Draw sessions that begin at these times; the turns of each are adjacent and in order.

    Raises:
        ValueError: an empty range, or one that begins below 1.
    """
    counts = rng.integers(*shape.turns, len(at_seconds), endpoint=True)
    total = int(counts.sum())
    own = rng.integers(*shape.input_range, total, endpoint=True).tolist()
    outputs = rng.integers(*shape.output_range, total, endpoint=True).tolist()
    thinks = rng.exponential(shape.think_seconds, total).tolist()
    made: list[WorkloadRequest] = []
    for session, (at, count) in enumerate(zip(at_seconds.tolist(), counts.tolist(), strict=True)):
        first = len(made)
        turns = [
            Turn(session, number, own[first + number], thinks[first + number] if number else 0.0)
            for number in range(count)
        ]
        made += session_requests(first, at, turns, outputs[first : first + count])
    return made


def session_requests(
    first_index: int, at_seconds: float, turns: Iterable[Turn], output_tokens: Sequence[int]
) -> list[WorkloadRequest]:
    """Build the requests of one session, without a shared part."""
    made: list[WorkloadRequest] = []
    history = 0
    for turn, output in zip(turns, output_tokens, strict=True):
        prompt = history + turn.own_tokens
        made.append(WorkloadRequest(first_index + turn.number, at_seconds, prompt, output, turn=turn))
        history = prompt + output
    return made


def share_prefixes(
    workload: Sequence[WorkloadRequest], num_tokens: int, num_groups: int, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """Prepend a shared part to each prompt, one of `num_groups`, drawn uniformly for each session or request.

    Raises:
        ValueError: no token or no group.
    """
    if num_tokens < 1 or num_groups < 1:
        raise ValueError(f"a shared prefix of {num_tokens} tokens in {num_groups} groups; both must be 1 or more")
    made: list[WorkloadRequest] = []
    for turns in sessions(workload):
        group = int(rng.integers(num_groups))
        for request in turns:
            turn = request.turn or Turn(request.index, 0, request.prompt_tokens)
            turn = replace(turn, shared_group=group, shared_tokens=num_tokens)
            made.append(replace(request, prompt_tokens=request.prompt_tokens + num_tokens, turn=turn))
    return made
