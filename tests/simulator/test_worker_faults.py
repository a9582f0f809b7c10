"""Faults of workers and loads under the virtual clock: when steps begin, who is lost, which loads fail or are slow."""

from typing import Any

import numpy as np
import pytest

import lorrery
from lorrery.service.errors import SettingsError

SETTINGS: dict[str, Any] = {
    "model": "Llama-3-8B",
    "worker": {"gpu": "H100-SXM"},
    "scheduler": {"policy": "fcfs", "worker_timeout_seconds": 2.0, "max_worker_losses": 2},
    "adapters": {"registry": [{"id": "a", "rank": 16}, {"id": "b", "rank": 16}]},
}


def columns(*faults: str, workers: int = 1, requests: lorrery.Requests | None = None) -> Any:
    requests = lorrery.Requests([0.0], [8], [400]) if requests is None else requests
    return lorrery.simulate(SETTINGS, requests, workers=workers, faults=faults).columns


def test_a_freeze_delays_a_stream_by_its_length_less_the_step_under_way() -> None:
    plain, frozen = columns(), columns("freeze_worker,worker=worker-0,at=1,for=1.5")
    late = frozen.end_seconds[0] - plain.end_seconds[0]
    assert 1.4 < late <= 1.5
    assert frozen.num_requeues[0] == 0


def test_a_worker_frozen_for_longer_than_its_scheduler_has_patience_is_lost_and_comes_back() -> None:
    found = columns("freeze_worker,worker=worker-0,at=1,for=4")
    assert (found.status[0], found.num_requeues[0], found.worker_id[0]) == ("OK", 1, "worker-0")
    assert found.end_seconds[0] > 5
    elsewhere = columns("freeze_worker,worker=worker-0,at=1", workers=2)
    assert (elsewhere.status[0], elsewhere.worker_id[0]) == ("OK", "worker-1")
    assert 3 < elsewhere.end_seconds[0] < found.end_seconds[0]


def test_the_first_loads_fail_and_then_none() -> None:
    requests = lorrery.Requests([0.0, 60.0, 120.0], [8] * 3, [4] * 3, ["a", "a", "b"])
    found = columns("adapter_load_failure,adapter=a,first=3", requests=requests)
    assert found.status.tolist() == ["UNAVAILABLE", "OK", "OK"]
    all_fail = columns("adapter_load_failure", requests=requests)
    assert all_fail.status.tolist() == ["UNAVAILABLE"] * 3


def test_a_slow_load_takes_its_multiple() -> None:
    requests = lorrery.Requests([0.0, 60.0], [8] * 2, [4] * 2, ["a", "b"])
    load = [
        columns(*faults, requests=requests).adapter_load_seconds
        for faults in ((), ("slow_adapter_load,factor=3,first=1",))
    ]
    assert load[1].tolist() == pytest.approx([3 * load[0][0], load[0][1]])


@pytest.mark.parametrize("fault", ["adapter_load_failure", "slow_adapter_load,factor=2", "slow_worker,factor=2"])
def test_a_fault_of_a_worker_that_is_not_there_is_refused(fault: str) -> None:
    with pytest.raises(SettingsError, match="no such worker; there are worker-0, worker-1"):
        columns(f"{fault},worker=worker-2", workers=2)


@pytest.mark.parametrize(
    "settings",
    [{"adapters": {"loading": "blocking"}}, {"engine": "vllm"}, {"engine": "sglang"}, {"scheduler": {"strict": True}}],
    ids=["blocking", "vllm", "sglang", "strict"],
)
@pytest.mark.parametrize("rule", ["adapter_load_failure,adapter=a", "slow_adapter_load,adapter=a,factor=2000"])
def test_a_load_that_fails_or_hangs_hurts_only_the_requests_that_need_it(settings: dict[str, Any], rule: str) -> None:
    settings = {"model": "Llama-3-8B", "worker": {"gpu": "H100-SXM"}} | settings
    settings["adapters"] = SETTINGS["adapters"] | settings.get("adapters", {}) | {"max_loras": 4}
    arrivals, names = [0.0, 0.0, 0.001, 0.3, 0.5], ["b", "a", None, "b", "a"]
    requests = lorrery.Requests(arrivals, [8] * 5, [40] * 5, names)
    plain, faulty = (lorrery.simulate(settings, requests, workers=1, faults=faults).columns for faults in ((), (rule,)))
    others = [place for place, name in enumerate(names) if name != "a"]
    took = [(found.end_seconds - np.array(arrivals))[others] for found in (plain, faulty)]
    assert (took[1] < took[0] + 0.1).all()
    assert faulty.status[others].tolist() == ["OK"] * 3
    fails = rule.startswith("adapter_load_failure")
    assert faulty.status[[1, 4]].tolist() == ["UNAVAILABLE" if fails else "OK"] * 2
