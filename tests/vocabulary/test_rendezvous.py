"""Rendezvous hashing, with bounded loads."""

import math

from hypothesis import given
from hypothesis import strategies as st

from lorrery.vocabulary.rendezvous import FEW, choose, choose_bounded

SERVERS = [f"10.0.0.{number}:1" for number in range(8)]
states = st.integers(1, 8).flatmap(
    lambda number: st.tuples(
        st.lists(st.integers(0, 50), min_size=number, max_size=number),
        st.lists(st.integers(1, 9), min_size=number, max_size=number),
    )
)


@given(key=st.text(max_size=5), state=states, bound=st.floats(1.001, 4))
def test_a_key_goes_to_the_first_in_its_ranking_that_has_room(
    key: str, state: tuple[list[int], list[int]], bound: float
) -> None:
    loads, sizes = state
    servers = SERVERS[: len(loads)]
    chosen = choose_bounded(key, servers, loads, sizes, bound)
    share = max(bound * (sum(loads) + 1) / sum(sizes), FEW)
    assert loads[chosen] + 1 <= math.ceil(share * sizes[chosen])
    ranking = []
    left = list(servers)
    while left:
        ranking.append(left.pop(choose(key, left)))
    for passed_over in ranking[: ranking.index(servers[chosen])]:
        index = servers.index(passed_over)
        assert loads[index] >= share * sizes[index]


@given(key=st.text(max_size=5), state=states)
def test_without_a_bound_load_does_not_matter(key: str, state: tuple[list[int], list[int]]) -> None:
    loads, sizes = state
    servers = SERVERS[: len(loads)]
    assert choose_bounded(key, servers, loads, sizes, math.inf) == choose(key, servers)


@given(keys=st.lists(st.text(max_size=5), max_size=20), number=st.integers(2, 8))
def test_a_server_that_goes_moves_its_own_keys_only(keys: list[str], number: int) -> None:
    before, after = SERVERS[:number], SERVERS[: number - 1]
    for key in keys:
        if (chosen := choose(key, before)) < number - 1:
            assert choose(key, after) == chosen
