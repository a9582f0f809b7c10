"""The lists of single adapters agree with the list of all, whoever comes and goes in whatever order."""

from hypothesis import given
from hypothesis import strategies as st

from lorrery.scheduler.core.queues.waiting import WaitingByAdapter, WaitingList, adapter_key
from lorrery.scheduler.core.sequence import Adapter, Sequence

ADAPTERS = (None, Adapter("a", 4), Adapter("b", 4), Adapter("b", 4, version=1))
KEYS = [None, "a", ADAPTERS[2].key if ADAPTERS[2] else None, ADAPTERS[3].key if ADAPTERS[3] else None]


def merged(waiting: WaitingByAdapter, keys: list[str | None]) -> list[int]:
    handles, sequences = [], waiting.merged(keys)
    while (sequence := sequences.first) is not None:
        sequences.take()
        handles.append(sequence.handle)
    return handles


@given(
    changes=st.lists(
        st.tuples(st.sampled_from(["come", "come", "go", "all go", "again"]), st.integers(0, 6), st.integers(0, 3)),
        max_size=40,
    ),
    keys=st.lists(st.sampled_from(KEYS), unique=True),
)
def test_each_adapters_list_is_that_of_all_without_the_others(
    changes: list[tuple[str, int, int]], keys: list[str | None]
) -> None:
    waiting, plain = WaitingByAdapter(), WaitingList()
    for handle, (what, at_ps, which) in enumerate(changes):
        sequence = Sequence(handle, 5, 5, at_ps, ADAPTERS[which])
        if what in ("go", "again") and len(plain):
            sequence = list(plain)[at_ps % len(plain)]
            assert waiting.pop(sequence.handle) is plain.pop(sequence.handle) is sequence
        if what in ("come", "again"):
            waiting.append(sequence)
            plain.append(sequence)
        elif what == "all go" and which == 0:
            assert waiting.clear() == plain.clear()
    assert list(waiting) == list(plain)
    assert set(waiting.adapters) == {adapter_key(sequence) for sequence in plain}
    for key in KEYS:
        assert list(waiting.of(key)) == [sequence for sequence in plain if adapter_key(sequence) == key]
    assert merged(waiting, keys) == [sequence.handle for sequence in plain if adapter_key(sequence) in keys]
    without = waiting.merged(KEYS)
    if (first := without.first) is not None:
        without.drop_adapter()
        rest = [s for s in plain if adapter_key(s) != adapter_key(first)]
        assert without.first is (rest[0] if rest else None)
    assert waiting.pop(10**6) is None
