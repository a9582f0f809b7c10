"""A caller that looks at a simulated cluster, scales it and lets time pass."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import lorrery
from lorrery.scheduler.core.autoscaling import METRICS, Autoscaler, Reading
from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import changed
from lorrery.simulator.virtual_cluster import RunIsOverError
from tests.simulator.test_autoscaling import CLUSTER, bursts, run


def cluster(**given) -> lorrery.VirtualCluster:
    return lorrery.VirtualCluster(CLUSTER, bursts(), **{"workers": 1, **given})


def test_the_shipped_rule_applied_by_a_caller_does_what_the_simulator_does_by_itself():
    own, rule = cluster(), Autoscaler(changed(CLUSTER).autoscaler.rule())
    while not own.done:
        seen = own.observe()
        waiting = Reading(seen.metrics["num_requests_waiting"], is_total=True)
        current = seen.num_ready + seen.num_starting
        decision = rule.decide(seen.at_seconds, current, seen.num_ready, {"num_requests_waiting": waiting})
        own.scale(decision.replicas)
        own.advance(5.0)
    ours, theirs = own.result(), run()
    assert ours.columns.end_seconds.tolist() == theirs.columns.end_seconds.tolist()
    assert ours.columns.worker_id.tolist() == theirs.columns.worker_id.tolist()
    assert ours.scaling is not None
    assert theirs.scaling is not None
    assert ours.scaling.summary == theirs.scaling.summary


@pytest.mark.parametrize("one_step", [False, True])
def test_looking_changes_nothing(one_step: bool):
    alone = lorrery.simulate(CLUSTER, bursts(), workers=1, overrides={"autoscaler.enabled": False})
    watched = cluster(one_step=one_step)
    seen = [watched.advance(0.37) for _ in range(400)]
    assert seen[-1].done
    assert {one.num_ready for one in seen} == {1}
    assert watched.result().columns.end_seconds.tolist() == alone.columns.end_seconds.tolist()


def test_workers_start_serve_and_drain_in_virtual_time():
    own = cluster()
    own.advance(2)
    own.scale(3)
    assert (own.observe().num_ready, own.observe().num_starting) == (1, 2)
    assert own.advance(4.9).num_ready == 1  # 3 s, and 16.06 GB at 8 GB/s: 5.007 s
    assert own.advance(0.2).num_ready == 3
    own.scale(1)
    after = own.advance(0.001)
    assert after.num_ready == 1
    assert after.num_draining in (1, 2)  # one that has nothing leaves at once
    assert own.advance(30).num_draining == 0
    found = own.result()
    assert found.counts["num_interrupted"] > 0
    assert found.counts["num_failed"] == 0
    assert found.scaling is not None
    assert [row.desired for row in found.scaling.timeline] == [3, 1]


@pytest.mark.parametrize(("lost", "stays"), [("worker-0", "worker-1"), ("worker-1", "worker-0")])
def test_a_worker_that_is_lost_is_seen_to_start_and_is_then_the_first_to_leave(lost: str, stays: str):
    own = cluster(workers=2, faults=[f"worker_loss,at=3,worker={lost}"])
    assert own.advance(2.9).num_ready == 2
    seen = own.advance(0.2)
    assert (seen.num_ready, seen.num_starting) == (1, 1)
    assert own.advance(5.0).num_ready == 2
    own.scale(1)
    assert own.advance(30).num_ready == 1
    found = own.result().columns
    late = (found.arrival_seconds > 9) & (found.status == "OK")
    assert set(found.worker_id[late]) == {stays}


def test_a_worker_may_be_lost_twice_by_the_settings_faults_too():
    losses = ["worker_loss,at=3,worker=worker-0", "worker_loss,at=9,worker=worker-0"]
    by_settings = cluster(overrides={"faults": losses})
    assert [by_settings.advance(4.25).num_ready for _ in range(4)] == [0, 1, 0, 1]  # a start takes 5 s
    assert cluster(faults=losses).advance(10).num_ready == 0


def test_the_same_is_there_as_prometheus_text():
    own = cluster()
    seen = own.advance(12)
    families = {family.name: family for family in text_string_to_metric_families(own.metrics())}
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert families[f"vllm:{name}"].samples[0].value == pytest.approx(seen.metrics[name])
    first = families["vllm:time_to_first_token_seconds"]
    counts = [one.value for one in first.samples if one.name.endswith("_bucket")]
    assert counts == sorted(counts)
    assert counts[-1] > 0
    tokens = families["vllm:generation_tokens"].samples[0].value
    assert tokens == pytest.approx(12 * seen.metrics["generation_tokens_per_second"])
    assert set(seen.metrics) == set(METRICS)


def test_at_the_end_its_series_say_of_all_requests_what_the_result_says():
    own = cluster()
    while not own.advance(10).done:
        pass
    samples = {
        sample.name.removeprefix("vllm:"): sample.value
        for family in text_string_to_metric_families(own.metrics())
        for sample in family.samples
    }
    found = own.result().columns
    assert samples["request_success_total"] == len(found.ttft_seconds) > 0
    assert samples["prompt_tokens_total"] == found.prompt_tokens.sum()
    assert samples["generation_tokens_total"] == found.output_tokens.sum()
    queued = found.queue_seconds + found.adapter_load_seconds  # a load in the background ends before the admission
    for name, seconds in (("time_to_first_token", found.ttft_seconds), ("request_queue_time", queued)):
        assert samples[f"{name}_seconds_count"] == len(seconds)
        assert samples[f"{name}_seconds_sum"] == pytest.approx(seconds.sum())


def test_what_cannot_be_is_refused():
    own = cluster()
    for wrong in (-1, 2.5, True, "2", None):
        with pytest.raises(SettingsError, match=f"num_replicas is {wrong!r}; it must be a whole number, 0 or more"):
            own.scale(wrong)
    for wrong in ("1", None, True):
        with pytest.raises(SettingsError, match=f"seconds to advance by is {wrong!r}; it must be a number"):
            own.advance(wrong)
    with pytest.raises(SettingsError, match=r"scale to 10001: .* to 10000"):
        own.scale(10_001)
    with pytest.raises(SettingsError, match="more than 0"):
        own.advance(0)
    with pytest.raises(SettingsError, match="at most"):
        own.advance(1e9)
    with pytest.raises(SettingsError, match="at most"):
        own.advance(1e300)
    own.result()
    for ask in (own.observe, own.metrics, lambda: own.scale(2), lambda: own.advance(1)):
        with pytest.raises(RunIsOverError, match="the run is over"):
            ask()


def test_once_every_request_has_ended_nothing_is_scaled_any_more():
    own = cluster()
    assert own.advance(400).done
    with pytest.raises(RunIsOverError, match="scale to 3: every request has ended"):
        own.scale(3)
    assert own.advance(1).num_ready == 1
    found = own.result()
    assert found.scaling is not None
    assert (found.scaling.timeline, found.scaling.summary.num_scale_ups) == ([], 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"faults": ["worker_loss,at=3,for=1,worker=worker-0"]}, "worker_loss,.* with a caller that scales"),
        ({"overrides": ["workers=[{count = 2}]", "autoscaler.enabled=false"], "workers": None}, "leave out .*workers"),
        ({"overrides": ["autoscaler.scrape_interval_seconds=15"]}, "scrape_interval_seconds is 15, and a caller that"),
    ],
)
def test_what_does_not_go_with_workers_that_come_and_go_is_refused(given: dict[str, Any], words: str):
    with pytest.raises(SettingsError, match=words):
        cluster(**given)


@pytest.mark.parametrize("taken", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_cluster_cannot_be_sent_elsewhere_but_what_it_shows_can(taken: Callable[[object], object]) -> None:
    virtual = lorrery.VirtualCluster(CLUSTER, bursts(), workers=1)
    with pytest.raises(TypeError, match="send its settings, workload and seed"):
        taken(virtual)
    seen = virtual.observe()
    assert pickle.loads(pickle.dumps(seen)) == seen
