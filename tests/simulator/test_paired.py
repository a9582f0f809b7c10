"""Paired differences: which requests make a pair, means, intervals, and groups."""

import math

import numpy as np
import pytest

from lorrery.loadgen.workload.outcome import OutcomeTable, RequestOutcome
from lorrery.simulator.paired import PairedDifference, paired


def table(
    ends: list[float], *, tokens: int = 3, tenants: str = "", failed: frozenset[int] = frozenset()
) -> OutcomeTable:
    return OutcomeTable.of(
        RequestOutcome(
            index=index,
            prompt_tokens=1,
            intended_seconds=float(index),
            sent_seconds=float(index),
            end_seconds=index + end,
            status="CANCELLED" if index in failed else "OK",
            tenant_id=tenants[index] if tenants else "",
            message_seconds=index + np.linspace(end / 2, end, tokens),
            message_tokens=np.ones(tokens, np.int64),
        )
        for index, end in enumerate(ends)
    )


def found(
    differences: tuple[PairedDifference, ...], metric: str, group: str = "all", name: str = ""
) -> PairedDifference:
    return next(one for one in differences if (one.metric, one.group, one.name) == (metric, group, name))


def test_a_difference_is_simulated_less_recorded_over_what_completed_in_both() -> None:
    differences = paired(
        table([1.0, 2.0, 4.0, 8.0], failed=frozenset({3})), table([2.0, 1.0, 9.0, 8.0], failed=frozenset({2}))
    )
    e2e = found(differences, "e2e")
    assert (e2e.num_pairs, e2e.recorded_ms, e2e.simulated_ms, e2e.difference_ms) == (2, 1500.0, 1500.0, 0.0)
    assert (e2e.faster_ratio, e2e.slower_ratio) == (0.5, 0.5)
    assert math.isnan(e2e.low_ms)
    assert found(differences, "ttft").recorded_ms == 750.0
    assert found(differences, "tpot").recorded_ms == 375.0


def test_an_interval_covers_the_true_mean_of_independent_differences_nineteen_times_of_twenty() -> None:
    rng, covered = np.random.default_rng(1), 0
    for _ in range(400):
        base = rng.uniform(1, 2, 30)
        one = found(paired(table(base.tolist()), table((base + rng.normal(0.1, 0.05, 30)).tolist())), "e2e")
        covered += one.low_ms <= 100.0 <= one.high_ms
    assert 0.92 <= covered / 400 <= 0.98


def test_tenants_are_compared_if_there_are_several_the_largest_first() -> None:
    ends = [1.0] * 6
    differences = paired(table(ends, tenants="abbbba"), table([1.0, *[2.0] * 4, 1.0], tenants="abbbba"))
    assert [one.name for one in differences if one.group == "tenant" and one.metric == "e2e"] == ["b", "a"]
    assert found(differences, "e2e", "tenant", "b").difference_ms == 1000.0
    assert found(differences, "e2e", "tenant", "a").difference_ms == 0.0
    assert not [one for one in differences if one.group == "adapter"]


def test_an_interrupted_simulation_is_compared_as_far_as_it_came() -> None:
    e2e = found(paired(table([1.0, 1.0, 1.0]), table([2.0, 2.0])), "e2e")
    assert (e2e.num_pairs, e2e.difference_ms) == (2, 1000.0)


def test_no_pair_is_no_figure() -> None:
    none = found(paired(table([1.0], failed=frozenset({0})), table([1.0])), "e2e")
    assert none.num_pairs == 0
    assert math.isnan(none.difference_ms)
    assert found(paired(table([1.0], tokens=1), table([1.0], tokens=1)), "tpot").num_pairs == 0
    assert found(paired(table([1.0]), table([1.5])), "e2e").difference_ms == pytest.approx(500)
