"""Where among many workers a request would end first, evaluated in the order of `finish_order`.

The same best and next finish, with the same ties, as `expected_finish` gives by evaluating each.
"""

from lorrery.scheduler.core.candidates import ReplicaCandidate
from lorrery.scheduler.core.expected_finish import expected_output_tokens, replica_finish_ps
from lorrery.scheduler.core.finish_order import NUMBER_BITS, NUMBERS
from lorrery.scheduler.core.forecast import ONE
from lorrery.scheduler.core.many_workers import ManyWorkers
from lorrery.scheduler.core.prefix_cache.holders import Way
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.machine_ints import product
from lorrery.vocabulary.units import NEVER


def first_of_many(
    sequence: Sequence, many: ManyWorkers, last_placed: dict[str, int], num_placed: int
) -> tuple[int, int, int]:
    """Return the number of the worker with the earliest finish, that finish, and the next, both in picoseconds.

    Ties: the least load, then the first to attach.

    Args:
        sequence: to be placed.
        many: up to date.
        last_placed: see `expected_finish.finishes_ps`.
        num_placed: placements so far.
    """
    candidates, order, adapter = many.candidates, many.finishes, sequence.adapter
    output_tokens = expected_output_tokens(sequence, candidates[0])
    input_tokens, further_tokens = sequence.input_tokens, output_tokens - 1
    way: Way = []
    computed_tokens = input_tokens
    if many.have_prefix_caches:
        held = many.holders(sequence)
        if held is None:
            computed_tokens = 1
        elif held:
            way = held
            computed_tokens = input_tokens - way[-1][0]
    best, best_load, first_ps, next_ps = -1, 0, NEVER, NEVER
    looked_at: list[int] = []
    for group in order.groups:
        base_ps, _, kv_token_ps, prompt_token_ps = group.pace
        own_ps = product(product(further_tokens, input_tokens + output_tokens // 2), kv_token_ps)
        alike_ps = base_ps + product(computed_tokens, prompt_token_ps) + own_ps
        least_ps = product(alike_ps, order.least_slowdown)
        rates, workers = group.rates, group.workers
        place, num_workers = 0, len(rates)
        while place < num_workers:
            rate_ps = product(further_tokens, rates[place])
            bound_ps = (rate_ps + least_ps) // ONE
            if bound_ps > first_ps and bound_ps >= next_ps:
                break
            number, slowdown = workers[place] & NUMBERS, workers[place] >> NUMBER_BITS
            bound_ps = (rate_ps + product(alike_ps, slowdown)) // ONE
            if bound_ps >= next_ps and (bound_ps > first_ps or (best_load == 0 and number > best)):
                place = group.behind_alike(place)  # it would rank behind those two, as all of higher number would
                continue
            place += 1
            candidate: ReplicaCandidate = candidates[number]
            if way or adapter is not None:
                more_ps = 0
                if adapter is not None:
                    # A blocked worker's load ends while the request waits; that wait is in the rate.
                    more_ps = max(0, candidate.load_ps(adapter) - product(further_tokens, order.blocked_ps[number]))
                if way:
                    more_ps += product(way[-1][0] - _held_tokens(way, number), prompt_token_ps)
                own_bound_ps = (rate_ps + product(alike_ps + more_ps, slowdown)) // ONE
                if own_bound_ps >= next_ps and own_bound_ps > first_ps:
                    continue
            end_ps = replica_finish_ps(sequence, candidate, output_tokens, last_placed, num_placed)
            looked_at.append(number)
            if end_ps > first_ps or (end_ps == first_ps and (candidate.load, number) > (best_load, best)):
                next_ps = min(next_ps, end_ps)
            else:
                best, best_load, first_ps, next_ps = number, candidate.load, end_ps, first_ps
    for number in looked_at:
        order.looked_at(number)
    return best, first_ps, next_ps


def _held_tokens(way: Way, number: int) -> int:
    """Return an upper bound on the leading prompt tokens that a worker's cache holds."""
    for tokens, numbers in reversed(way):
        if numbers >> number & 1:
            return tokens
    return 0
