"""The N names with most traffic, and `other`."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lorrery.service.telemetry.top_names import MAX_CHARACTERS, OTHER, TopNames

NUM_NAMES = 100_000


class Counted:
    def __init__(self) -> None:
        self.requests = 0


def top(most: int) -> TopNames[Counted]:
    return TopNames(most, Counted, "none")


def request(names: TopNames[Counted], name: str) -> None:
    names.count(name).requests += 1


def shown(names: TopNames[Counted]) -> dict[str, int]:
    values = [(label, record.requests) for label, record in names.shown()]
    assert len(dict(values)) == len(values), "a label is there twice"
    return dict(values)


def test_names_are_shown_from_their_first_request_while_there_is_room():
    names = top(2)
    for name in ("a", "b", "c", "", "a"):
        request(names, name)
    assert shown(names) == {"none": 1, "a": 2, "b": 1, OTHER: 1}


def test_names_that_are_foreseen_are_there_with_nothing_and_give_way_to_traffic():
    names = top(3)
    names.foresee(["a", "", "x" * (MAX_CHARACTERS + 1), "b\n", "a", OTHER, "b", "c", "d"])
    assert shown(names) == {"none": 0, "a": 0, f"'{OTHER}'": 0, "b": 0, OTHER: 0}
    for name in ("b", *["z"] * 10):
        request(names, name)
    assert shown(names)["b"] == 1
    assert "z" in shown(names)
    assert len(shown(names)) == 5


def test_nameless_and_other_are_there_from_the_start():
    assert shown(top(3)) == {"none": 0, OTHER: 0}


def test_name_with_more_traffic_takes_the_place_of_the_least():
    names = top(2)
    for name in ("a", "b", *["c"] * 20):
        request(names, name)
    labels = shown(names)
    assert "c" in labels
    assert len(labels) == 4
    assert names.label("c") == "c"


def test_names_of_like_traffic_do_not_change_places():
    names = top(5)
    rng = np.random.default_rng(7)
    request(names, "0")
    for number in rng.integers(0, 30, 20_000):
        request(names, str(number))
        if number == 0:
            first = set(shown(names))
    assert len(first & set(shown(names))) == len(first)


def test_the_heaviest_of_many_are_found():
    names = top(10)
    rng = np.random.default_rng(7)
    weights = 1 / np.arange(1, 1001) ** 1.2
    for number in rng.choice(1000, 30_000, p=weights / weights.sum()):
        request(names, str(number))
    assert {str(number) for number in range(5)} <= set(shown(names))


def test_old_traffic_is_forgotten():
    names = top(2)
    for _ in range(3000):
        request(names, "a")
        request(names, "b")
    for _ in range(5000):
        request(names, "c")
    assert "c" in shown(names)


def test_names_that_pass_cost_no_memory_and_displace_nobody():
    names = top(3)
    for _ in range(10):
        for name in ("a", "b", "c"):
            request(names, name)
    for number in range(NUM_NAMES):
        request(names, f"passing-{number}")
        if number % 100 == 0:
            for name in ("a", "b", "c"):
                request(names, name)
    assert set(shown(names)) == {"none", "a", "b", "c", OTHER}
    kept = sum(len(part) for part in vars(names).values() if isinstance(part, dict))
    assert kept < 300
    assert shown(names)[OTHER] == NUM_NAMES


def test_hostile_names_are_harmless():
    names = top(10)
    hostile = ["other", "none", "'other'", "x" * (MAX_CHARACTERS + 1), "a\nb", "\ud800", "\x00", 'q"uote\\']
    for name in hostile:
        request(names, name)
    labels = shown(names)
    assert sum(labels.values()) == len(hostile)
    assert labels[OTHER] == 4
    assert labels["'other'"] == labels["'none'"] == labels["''other''"] == 1
    assert all(label.encode() for label in labels)


def test_what_counts_as_no_traffic_brings_no_name_into_view():
    names = top(2)
    names.of("a").requests += 1
    assert shown(names) == {"none": 0, OTHER: 1}


@given(st.lists(st.sampled_from(["", *"abcdefgh"]), max_size=400), st.integers(1, 4))
def test_every_counter_only_grows_and_every_request_is_in_one(stream: list[str], most: int):
    names = top(most)
    last: dict[str, int] = {}
    grown = 0
    for name in stream:
        request(names, name)
        now = shown(names)
        assert len(now) <= most + 2
        assert all(value >= last.get(label, 0) for label, value in now.items())
        grown += sum(value - last.get(label, 0) for label, value in now.items())
        last |= now
    assert grown == len(stream)
