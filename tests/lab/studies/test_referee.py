"""The rules that the referee compares, alone and as placements in virtual time."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from lab.studies.referee import RATES, Run, rows_of, virtual
from lab.studies.routing import RULES, SLACK, Engine, affinity, holder, least_loaded, residency, round_robin, running

IDLE = [Engine(), Engine(), Engine()]


def with_adapter(number: int, **changes: object) -> list[Engine]:
    """Idle engines, of which one is different."""
    return [replace(one, **changes) if at == number else one for at, one in enumerate(IDLE)]  # type: ignore[arg-type]


def test_round_robin_takes_turns_whatever_the_load() -> None:
    sent = [0, 0, 0]
    for expected in (0, 1, 2, 0, 1):
        chosen = round_robin("a", [Engine(load=9 - one, sent=one) for one in sent])
        assert chosen == expected
        sent[chosen] += 1


def test_least_loaded_breaks_ties_by_the_requests_sent() -> None:
    assert least_loaded("a", [Engine(2, 5), Engine(1, 7), Engine(1, 6)]) == 2


def test_affinity_keeps_an_adapter_on_one_engine_and_most_of_them_there_when_an_engine_is_added() -> None:
    names = [f"a-{number}" for number in range(200)]
    three = [affinity(one, IDLE) for one in names]
    four = [affinity(one, [*IDLE, Engine()]) for one in names]
    assert min(map(three.count, range(3))) > 40
    assert all(now == then for now, then in zip(four, three, strict=True) if now != 3)
    assert affinity("a-1", [replace(one, load=99) for one in IDLE]) == three[1]


@pytest.mark.parametrize(
    ("rule", "series"), [(running, "running"), (residency, "gpu"), (holder, "gpu"), (holder, "host")]
)
def test_a_rule_prefers_an_engine_with_the_adapter_until_it_has_too_many_requests(
    rule: Callable[[str, list[Engine]], int], series: str
) -> None:
    assert rule("a", with_adapter(2, load=SLACK, **{series: {"a"}})) == 2
    assert rule("a", with_adapter(2, load=SLACK + 1, **{series: {"a"}})) == 0
    assert rule("b", with_adapter(2, load=1, **{series: {"a"}})) == 0


def test_holder_prefers_the_gpu_to_host_memory_and_residency_does_not_see_host_memory() -> None:
    engines = [Engine(host={"a"}), Engine(), Engine(load=1, gpu={"a"})]
    assert holder("a", engines) == 2
    assert residency("a", [Engine(), Engine(sent=1, host={"a"})]) == 0


def test_in_virtual_time_a_rule_that_sees_adapters_loads_fewer_of_them_than_round_robin() -> None:
    figures = {rule: virtual(rule, RATES[0], 1, 10.0) for rule in RULES}
    assert all(one["failed"] == 0 for one in figures.values())
    loads = {rule: one["loads_per_request"] for rule, one in figures.items()}
    assert max(loads["affinity"], loads["residency"], loads["holder"]) < 0.8 * loads["round_robin"]
    assert loads["residency"] < loads["running"] < loads["round_robin"]  # a running adapter is in memory
    assert figures["round_robin"]["fullest"] < 1.05 < figures["affinity"]["fullest"]
    assert virtual("holder", RATES[0], 1, 10.0) == figures["holder"]


def test_live_runs_are_compared_with_virtual_ones_of_the_same_requests() -> None:
    def figures(value: float) -> dict[str, float]:
        return dict.fromkeys(
            ("ttft_p50_ms", "ttft_p99_ms", "good_per_second", "loads_per_request", "fullest", "tokens_per_second"),
            value,
        ) | {"failed": 0.0}

    runs = [Run("round_robin", "virtual", 8.0, seed, figures(10.0 * seed)) for seed in range(4)]
    runs += [Run("smg round_robin", "live", 8.0, seed, figures(10.0 * seed + 1 + seed)) for seed in range(2)]
    found = {row["clock"]: row for row in rows_of(runs) if row["figure"] == "fullest"}
    assert (found["virtual"]["mean"], found["virtual"]["runs"]) == (15.0, 4)
    assert (found["live"]["mean"], found["live - virtual"]["mean"], found["live - virtual"]["runs"]) == (6.5, 1.5, 2)
    assert found["live"]["half"] > found["live - virtual"]["half"] > 0
