"""The fewest loads, against a search through every choice."""

from functools import cache

import numpy as np
import pytest

from lorrery.simulator.arena.oracle import Use, fewest_loads


def exhaustive(uses: list[Use], places: int) -> int:
    """Try every eviction of every unused adapter, at every moment."""

    @cache
    def fewest(at: int, there: frozenset[str]) -> int:
        if at == len(uses):
            return 0
        running = dict[str, int]()
        for key, change in uses[:at]:
            running[key] = running.get(key, 0) + change
        pinned = {key for key, count in running.items() if count}
        key, change = uses[at]
        if change < 0 or key in there:
            return fewest(at + 1, there | {key} if change > 0 else there)
        if len(there) < places:
            return 1 + fewest(at + 1, there | {key})
        return min(1 + fewest(at + 1, there - {gone} | {key}) for gone in there - pinned)

    return fewest(0, frozenset())


def drawn(rng: np.random.Generator, places: int) -> list[Use]:
    uses, running = list[Use](), list[str]()
    for _ in range(int(rng.integers(4, 18))):
        key = "abcde"[rng.integers(5)]
        if running and rng.random() < 0.5:
            uses.append((running.pop(rng.integers(len(running))), -1))
        elif key in running or len(set(running)) < places:
            running.append(key)
            uses.append((key, 1))
    return uses


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_of_evictions_needs_fewer_loads(seed: int) -> None:
    rng = np.random.default_rng(seed)
    places = int(rng.integers(1, 4))
    uses = drawn(rng, places)
    assert fewest_loads(uses, places) == exhaustive(uses, places)


def test_with_a_place_for_each_an_adapter_is_loaded_once() -> None:
    assert fewest_loads([("a", 1), ("a", -1), ("b", 1), ("b", -1), ("a", 1)], 2) == 2


def test_belady_keeps_what_is_needed_first() -> None:
    order = "abcabdab"
    uses = [(key, change) for key in order for change in (1, -1)]
    assert fewest_loads(uses, 2) == 6
    assert fewest_loads(uses, 3) == 4
