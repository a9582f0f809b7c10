"""Changes to adapters: of any logs that were told the same, in any order, each has the latest of every adapter."""

import random

from hypothesis import given
from hypothesis import strategies as st

from lorrery.vocabulary.adapters import MAX_VERSION, AdapterChange, AdapterLog, adapter_key

NAMES = ("a", "b", "c", "listed")
CHANGES = st.lists(
    st.builds(AdapterChange, st.integers(1, 12), st.sampled_from(NAMES), st.sampled_from([0, 0, 8, 16])), max_size=14
)


def test_an_adapter_is_named_with_its_version_but_for_what_the_settings_list() -> None:
    assert (adapter_key("a", 0), adapter_key("a", 7)) == ("a", "a@7")


@given(CHANGES, st.randoms(use_true_random=False))
def test_logs_that_are_told_the_same_in_any_order_and_any_number_of_times_are_equal(
    changes: list[AdapterChange], rng: random.Random
) -> None:
    one, other = AdapterLog(["listed"]), AdapterLog(["listed"])
    one.merge(changes)
    told = changes + rng.choices(changes, k=len(changes)) if changes else []
    rng.shuffle(told)
    for change in told:
        other.merge([change])
    assert one.changes == other.changes
    latest = {name: max((c for c in changes if c.adapter_id == name), default=None) for name in NAMES}
    assert {change.adapter_id: change for change in one.changes} == {n: c for n, c in latest.items() if c is not None}


@given(CHANGES)
def test_news_is_what_changes_the_log_in_order(changes: list[AdapterChange]) -> None:
    log, known = AdapterLog(), dict[str, int]()
    for change in changes:
        for version, name, rank in log.merge([change]):
            known[name] = rank
            assert version == change.version
        assert known == {latest.adapter_id: latest.rank for latest in log.changes}
        assert log.num_loaded == sum(rank > 0 for rank in known.values())
    assert log.merge(changes) == []


def test_a_version_is_above_all_that_are_known_and_not_below_the_time() -> None:
    log = AdapterLog()
    assert log.next_version(100) == 100
    log.merge([AdapterChange(150, "a", 8)])
    assert log.next_version(120) == 151  # the clock of whoever decided was ahead, or ours went back
    assert log.next_version(200) == 200


def test_versions_that_cannot_be_are_no_news() -> None:
    log = AdapterLog()
    assert log.merge([AdapterChange(0, "a", 8), AdapterChange(MAX_VERSION + 1, "b", 8)]) == []
    assert log.changes == []


def test_an_old_load_does_not_bring_back_what_was_unloaded_also_when_the_unload_is_forgotten() -> None:
    log = AdapterLog(["listed"], max_unloads=1)
    log.merge([AdapterChange(1, "a", 8), AdapterChange(2, "b", 8), AdapterChange(3, "listed", 0)])
    log.merge([AdapterChange(4, "a", 0), AdapterChange(5, "b", 0)])
    assert [change.adapter_id for change in log.changes] == ["listed", "b"]  # those of listed ones stay
    assert log.forgotten == 4
    assert log.merge([AdapterChange(1, "a", 8), AdapterChange(4, "c", 8)]) == []
    assert log.merge([AdapterChange(6, "a", 8)]) == [AdapterChange(6, "a", 8)]


def test_the_oldest_unloads_are_forgotten_also_of_adapters_that_come_and_go() -> None:
    log, version = AdapterLog(max_unloads=3), 0
    for _ in range(50):
        for name in NAMES:
            for rank in (8, 0):
                version += 1
                log.merge([AdapterChange(version, name, rank)])
        assert [change.adapter_id for change in log.changes] == list(NAMES[1:])
        assert (log.forgotten, log.num_loaded) == (version - 6, 0)


class _Counted(AdapterChange):
    num_compared = 0

    def __lt__(self, other: object) -> bool:
        _Counted.num_compared += 1
        return super().__lt__(other)  # type: ignore[operator]


def test_a_change_is_compared_with_few_others_however_many_are_known() -> None:
    num_compared = []
    for num_known in (10, 10_000):
        log = AdapterLog()
        log.merge(_Counted(number + 1, f"known-{number}", 8 * (number % 2)) for number in range(num_known))
        _Counted.num_compared = 0
        for version in range(num_known + 1, num_known + 101):
            log.merge([_Counted(version, f"new-{version % 7}", 8 * (version % 2))])
        num_compared.append(_Counted.num_compared)
    assert num_compared[1] <= 20 * 100, num_compared


def test_a_log_takes_back_what_another_has_forgotten_the_unload_of() -> None:
    far, near = AdapterLog(max_unloads=1), AdapterLog(max_unloads=1)
    for log in (far, near):
        log.merge([AdapterChange(1, "a", 8), AdapterChange(2, "b", 8)])
    near.merge([AdapterChange(3, "a", 0), AdapterChange(4, "c", 8), AdapterChange(5, "d", 0)])
    assert near.forgotten == 3
    news = far.merge_all(near.changes, near.forgotten)
    assert news == [AdapterChange(1, "a", 0), AdapterChange(4, "c", 8), AdapterChange(5, "d", 0)]
    assert near.merge_all(far.changes, far.forgotten) == []
    assert (far.changes, far.forgotten) == (near.changes, near.forgotten)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(NAMES), st.booleans()), max_size=40), st.randoms())
def test_whoever_hears_of_whom_first_all_know_the_same_in_the_end(
    decisions: list[tuple[int, str, bool]], rng: random.Random
) -> None:
    """Each change is decided by one of three and told to the others soon or late, as a whole or alone."""
    logs = [AdapterLog(["listed"], max_unloads=2) for _ in range(3)]
    known = dict[str, int]()
    for place, name, loads in decisions:
        change = AdapterChange(logs[0].next_version(0), name, 8 if loads else 0)
        known[name] = change.rank
        logs[0].merge([change])
        if rng.random() < 0.7:
            logs[place].merge([change])
    for _ in range(2):
        pairs = [(one, other) for one in logs for other in logs if one is not other]
        rng.shuffle(pairs)
        for one, other in pairs:
            one.merge_all(other.changes, other.forgotten)
    for log in logs:
        assert {c.adapter_id: c.rank for c in log.changes if c.rank} == {n: r for n, r in known.items() if r}
