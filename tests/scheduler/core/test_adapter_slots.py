"""SGLang's places for adapters: the base model takes one, each batch has its own, and adapters drain for others."""

import pytest

from lorrery.scheduler.core.adapters.loads import AdapterOptions
from lorrery.scheduler.core.adapters.slots import AdapterDrain, AdapterSlots
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter, Sequence

A, B, C, D = (Adapter(name, 1) for name in "abcd")


def slots(places: int, *pinned: str) -> AdapterSlots:
    made = AdapterSlots(AdapterOptions(max_loras=places), lambda adapter, tier: 100, pinned=frozenset(pinned))
    made.serve(Running().adapter_use)
    return made


def place(made: AdapterSlots, *batch: Adapter, with_base: bool = False) -> list[tuple[str | None, ...]]:
    loads = made.place({one.key: one for one in batch}, 0, with_base=with_base)
    assert made.wait_ps(loads, 0) == 100 * bool(loads)
    return list(made.last_loads)


def test_the_base_model_has_a_place_from_the_start_and_goes_last():
    made = slots(2)
    assert place(made, A) == [("a",)]
    assert place(made, B) == [("b", "a")]
    assert place(made, A, B) == [("a", None)]
    assert not made.has_base
    assert place(made, B, with_base=True) == [(None, "a")]


def test_the_least_recently_used_goes_and_those_of_a_batch_count_in_the_order_of_their_keys():
    made = slots(4)
    place(made, C, A, B)
    assert place(made, D) == [("d", "a")]
    assert place(made, B, D) == []
    assert place(made, A) == [("a", "c")]


def test_a_prefill_evicts_what_others_decode_with_and_the_next_decode_waits_for_it():
    made = slots(2)
    made.use.pin(A)
    place(made, A)
    assert place(made, B) == [("b", "a")]
    assert place(made, A, B) == [("a", None)]
    assert set(made.gpu) == {"a", "b"}


def test_a_pinned_adapter_stays_and_its_place_is_kept_free_for_it():
    made = slots(3, "a")
    place(made, A)
    place(made, B)
    assert place(made, C) == [("c", "b")]
    assert made.fit({"a", "b", None})
    assert not made.fit({"b", "c", "d"})
    assert not made.fit({"b", "c", None})


def running_with(*rows: tuple[Adapter | None, int]) -> Running:
    running = Running()
    for handle, (adapter, most) in enumerate(rows):
        one = Sequence(handle, 5, most, adapter=adapter)
        running.admit(one)
        running.join(one)
    return running


def waiting(*rows: tuple[Adapter | None, int]) -> list[tuple[Sequence, tuple[int, int]]]:
    return [(Sequence(100 + n, 5, 9, adapter=adapter), (at_ps, n)) for n, (adapter, at_ps) in enumerate(rows)]


def test_the_adapter_that_is_done_first_drains_for_the_one_that_has_waited_longest():
    drain, running = AdapterDrain(100, 2), running_with((A, 30), (B, 10))
    drain.update(waiting((C, 60), (D, 50)), running, 160)
    assert drain.draining == {"b": "d"}  # C has not waited for more than the threshold
    drain.update(waiting((C, 60), (D, 50)), running, 200)
    assert drain.draining == {"b": "d", "a": "c"}


def test_nothing_drains_while_a_place_is_free_nor_for_the_base_model():
    drain = AdapterDrain(100, 3)
    drain.update(waiting((C, 0)), running_with((A, 30), (B, 10)), 500)
    assert drain.draining == {}
    drain = AdapterDrain(100, 2)
    drain.update(waiting((None, 0)), running_with((A, 30), (B, 10)), 500)
    assert drain.draining == {}


@pytest.mark.parametrize(
    ("left", "most", "admitted"), [(9, 10, True), (9, 11, False), (10, 12, True), (10, 13, False), (20, 24, True)]
)
def test_a_draining_adapter_admits_what_ends_within_a_fifth_more(left: int, most: int, admitted: bool):
    drain, running = AdapterDrain(100, 2), running_with((A, 30), (B, left + 1))  # one has come with the prompt
    drain.update(waiting((C, 0)), running, 500)
    assert drain.admits(Sequence(9, 5, most, adapter=B)) is admitted
    assert drain.admits(Sequence(9, 5, 1000, adapter=A))


def test_an_adapter_has_drained_when_none_of_its_sequences_runs():
    drain = AdapterDrain(100, 2)
    drain.update(waiting((C, 0)), running_with((A, 30), (B, 10)), 500)
    drain.update(waiting((C, 0)), running_with((A, 30)), 501)
    assert drain.draining == {}
