"""S-LoRA's figures: shapes, and a few points beside what its repository published."""

from itertools import pairwise

import pytest

from lab.studies.adapters import CVS, MANY, RATE, SATURATED_RATE, SLORA, Point, measure, read_published


@pytest.mark.parametrize(("setting", "num_adapters"), [("S1", 0), ("S1", 200), ("S2", 1), ("S2", 100)])
def test_throughput_at_saturation_is_near_the_published(setting: str, num_adapters: int) -> None:
    point = measure(Point("adapters", setting, SLORA, num_adapters, SATURATED_RATE), 300.0)
    throughput, _ = read_published()[setting, num_adapters, SATURATED_RATE, 1.0, 1.0]
    assert point.throughput == pytest.approx(throughput, rel=0.05)


def test_more_adapters_cost_a_little_under_slora_and_nearly_all_one_at_a_time() -> None:
    def throughputs(policy: str) -> list[float]:
        counts = (1, 20, 500)
        return [measure(Point("adapters", "S2", policy, n, SATURATED_RATE), 60.0).throughput for n in counts]

    for policy in (SLORA, "peft"):
        assert all(fewer >= more for fewer, more in pairwise(throughputs(policy)))
    assert throughputs(SLORA)[-1] > 0.7 * throughputs(SLORA)[0]
    assert throughputs("peft")[-1] < 0.3 * throughputs("peft")[0]


def test_bursts_cost_throughput() -> None:
    calm, bursty = (measure(Point("bursts", "S2", SLORA, MANY, RATE, cv=cv), 300.0) for cv in (1.0, CVS[-1]))
    assert bursty.throughput < 0.9 * calm.throughput


def test_a_run_that_its_authors_call_a_backup_counts_only_where_there_is_no_other() -> None:
    published = read_published()
    assert published["S2", 100, 2.0, 1.0, 1.0][0] == pytest.approx(1.592, abs=1e-3)  # its backup has 1.559
    assert published["S1", 200, 2.0, 0.1, 1.0][0] == pytest.approx(1.797, abs=1e-3)
