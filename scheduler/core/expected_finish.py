"""When a request would end on each of several workers: the computation behind `placements.predicted_finish`.

The formula is given there. It is most of that placement's cost, so a replica's figures are read from it directly; those
of other candidates (noted for a journal, or read back from one) are read by name, with the same result.

Whole numbers throughout. Cost: O(candidates), and a look-up for each that has a prefix cache.
"""

from collections.abc import Sequence as Many
from typing import Final

from lorrery.scheduler.core.candidates import ReplicaCandidate
from lorrery.scheduler.core.forecast import ONE, finish_ps
from lorrery.scheduler.core.placements.base import Candidate
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.machine_ints import product

HALVING: Final = 64
"""Number of placements elsewhere that halve the weight of a worker's slowdown beyond its usual one."""

FORGIVEN: Final = 32 * HALVING
"""Number of placements elsewhere after which no slowdown beyond the usual one counts, up to a million times that."""


def finishes_ps(
    sequence: Sequence, candidates: Many[Candidate], last_placed: dict[str, int], num_placed: int
) -> list[int]:
    """Return how long after now a sequence would end on each of the candidates, in picoseconds.

    Args:
        sequence: to be placed.
        candidates: at least one.
        last_placed: by name: number, from 1, of the last placement that went there; candidates without one among the
            last `FORGIVEN` may be missing.
        num_placed: placements so far.
    """
    output_tokens = expected_output_tokens(sequence, candidates[0])
    finishes: list[int] = []
    for candidate in candidates:
        if isinstance(candidate, ReplicaCandidate):
            end_ps = replica_finish_ps(sequence, candidate, output_tokens, last_placed, num_placed)
        else:
            end_ps = _finish_ps(sequence, candidate, output_tokens)
            slowdown, usual = candidate.slowdown, candidate.usual_slowdown
            end_ps = _slowed_ps(end_ps, slowdown, usual, num_placed, last_placed.get(candidate.name, 0))
        finishes.append(end_ps)
    return finishes


def expected_output_tokens(sequence: Sequence, candidate: Candidate) -> int:
    """Return the expected output tokens of a sequence; the same at all workers."""
    return max(sequence.budget_tokens * candidate.output_ratio // ONE, 1)


def replica_finish_ps(
    sequence: Sequence, candidate: ReplicaCandidate, output_tokens: int, last_placed: dict[str, int], num_placed: int
) -> int:
    """Return how long after now a sequence with this much output would end at one worker, in picoseconds."""
    end_ps = candidate.finish_ps(sequence, output_tokens)
    forecast = candidate.forecast
    slowdown, usual = forecast.slowdown, forecast.usual_slowdown
    if slowdown == usual:
        return product(end_ps, max(slowdown, 1)) // ONE
    return _slowed_ps(end_ps, slowdown, usual, num_placed, last_placed.get(candidate.name, 0))


def _slowed_ps(end_ps: int, slowdown: int, usual: int, num_placed: int, last_placed: int) -> int:
    slowdown = usual + ((slowdown - usual) >> ((num_placed - last_placed) // HALVING))
    return product(end_ps, max(slowdown, 1)) // ONE


def _finish_ps(sequence: Sequence, candidate: Candidate, output_tokens: int) -> int:
    num_running, num_waiting = candidate.num_running, candidate.num_waiting
    return finish_ps(
        candidate.pace,
        num_running,
        num_waiting,
        candidate.waiting_tokens,
        candidate.kv_tokens,
        sequence.input_tokens,
        candidate.cached_tokens(sequence),
        output_tokens,
        candidate.prompt_share,
        num_waiting > 0 and num_running > 0 and candidate.is_blocked,
        0 if sequence.adapter is None else candidate.load_ps(sequence.adapter),
    )
