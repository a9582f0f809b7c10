"""Device times on 64 bits that wrap."""

from hypothesis import given
from hypothesis import strategies as st

from lorrery.vocabulary.wire_time import FAR_PS, from_wire, to_wire

LIMIT = 2**63
TIMES = st.one_of(
    st.integers(0, 2**70), st.integers(LIMIT - 10, LIMIT + 10), st.integers(2 * LIMIT - 10, 2 * LIMIT + 10)
)


@given(at_ps=TIMES, off_ps=st.integers(-FAR_PS, FAR_PS))
def test_a_time_is_what_its_reader_takes_it_for(at_ps: int, off_ps: int) -> None:
    wire_ps = to_wire(at_ps)
    assert -LIMIT <= wire_ps < LIMIT
    assert from_wire(wire_ps, at_ps + off_ps) == at_ps


@given(at_ps=st.integers(0, LIMIT - 1))
def test_before_the_first_wrap_a_time_is_itself(at_ps: int) -> None:
    assert to_wire(at_ps) == at_ps
