import numpy as np
import pytest

import lorrery
from lorrery.loadgen.workload.summary import jain_index


@pytest.mark.parametrize(
    ("served", "index"), [([5, 5, 5], 1.0), ([9, 0, 0], 1 / 3), ([1, 3], 16 / 20), ([0, 0], 1.0), ([], 1.0)]
)
def test_jain_index(served: list[float], index: float) -> None:
    assert jain_index(served) == pytest.approx(index)


def simulated(tenants: list[str] | str, *faults: str) -> lorrery.SimulationResult:
    workload = lorrery.Requests(
        at_seconds=np.arange(4) * 0.1,
        prompt_tokens=np.array([10, 10, 10, 40]),
        output_tokens=np.full(4, 10),
        tenant_id=tenants,
    )
    return lorrery.simulate({}, workload, workers=1, faults=faults)


def test_a_report_says_what_each_tenant_got() -> None:
    fair = simulated(["b", "a", "b", "b"]).summary.fairness
    assert fair is not None
    assert [(one.tenant_id, one.num_completed, one.served_tokens) for one in fair.tenants] == [
        ("a", 1, 20),
        ("b", 3, 90),
    ]
    assert fair.jain_index == pytest.approx(110**2 / (2 * (20**2 + 90**2)))
    assert all(0 < one.ttft_p50_ms <= one.ttft_p99_ms for one in fair.tenants)


def test_what_a_failed_request_got_is_no_service() -> None:
    fair = simulated(["b", "a", "b", "c"], "cut,after=5,tenant=b,first=1", "cut,after=5,tenant=c").summary.fairness
    assert fair is not None
    assert [(one.tenant_id, one.num_requests, one.num_completed, one.served_tokens) for one in fair.tenants] == [
        ("a", 1, 1, 20),
        ("b", 2, 1, 20),
        ("c", 1, 0, 0),
    ]
    assert fair.jain_index == pytest.approx(40**2 / (3 * (20**2 + 20**2)))
    assert (fair.tenants[2].ttft_p50_ms, fair.tenants[2].ttft_p99_ms) == (0, 0)


def test_without_tenants_nothing_is_said() -> None:
    assert simulated("").summary.fairness is None
