"""Stop sequences found by one automaton, and draws that are the same everywhere."""

from hypothesis import given
from hypothesis import strategies as st

from lorrery.vocabulary.outputs import START, StopAutomaton, hash64, hashes64

few_symbols = st.lists(st.integers(0, 2), max_size=30)
sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=6)


@given(few_symbols, sequences)
def test_each_state_says_what_ends_and_what_may_begin_there(text: list[int], stops: list[list[int]]) -> None:
    automaton = StopAutomaton(stops)
    state = START
    for end in range(1, len(text) + 1):
        state = automaton.step(state, text[end - 1])
        seen = text[:end]
        assert automaton.matched[state] == max((len(stop) for stop in stops if seen[-len(stop) :] == stop), default=0)
        begun = [length for length in range(end + 1) if any(stop[:length] == seen[end - length :] for stop in stops)]
        assert automaton.depth[state] == max(begun, default=0)


def test_symbols_may_have_32_bits_and_empty_sequences_match_nothing() -> None:
    automaton = StopAutomaton([(2**32 - 1, 0), ()])
    assert automaton.first_symbols == {2**32 - 1}
    state = automaton.step(START, 2**32 - 1)
    assert not automaton.matched[START]
    assert not automaton.matched[state]
    assert automaton.matched[automaton.step(state, 0)] == 2
    assert StopAutomaton([]).step(START, 7) == START


def test_its_size_is_the_total_length_and_what_begins_alike_is_kept_once() -> None:
    stops = [[1] * 1000 + [number] for number in range(1000)]
    assert len(StopAutomaton(stops).depth) == 1 + 1001 + 999


def test_the_numbers_are_splitmix64s() -> None:
    """The first of the reference implementation with the seed 1234567."""
    assert [hash64(1234567, position) for position in range(2)] == [6457827717110365317, 3203168211198807973]


def test_many_at_once_are_the_same() -> None:
    assert hashes64(2**63 + 5, 20).tolist() == [hash64(2**63 + 5, position) for position in range(20)]
