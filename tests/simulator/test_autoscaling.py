"""Workers that come and go by a rule within one simulated run."""

import csv
from pathlib import Path

import numpy as np
import pytest

import lorrery
from lorrery.loadgen.report import scaling_lines
from lorrery.loadgen.workload.outcome import OutcomeTable, RequestOutcome
from lorrery.scheduler.core.autoscaling import Decision, Reading, Sample
from lorrery.service.errors import SettingsError
from lorrery.simulator.autoscaling import good_ratio, scaling_row
from lorrery.simulator.result import SimulationResult

RULE = {
    "enabled": True,
    "target": 2.0,
    "max_replicas": 6,
    "sync_period_seconds": 5.0,
    "start_seconds": 3.0,
    "disk_gb_per_second": 8.0,
    "scale_down_stabilization_seconds": 20.0,
}
CLUSTER = {
    "model": "Llama-3-8B",
    "worker": {"gpu": "A10G"},
    "adapters": {"registry": [{"id": "lora", "rank": 16, "count": 12}]},
    "scheduler": {"max_req_input_len": 1024, "max_req_total_len": 2048, "worker_wait_seconds": 300.0},
    "autoscaler": RULE,
}


def bursts() -> lorrery.Requests:
    """Two waves of 15 s with 9 requests a second, a lull of a minute between them, and stragglers."""
    rng = np.random.default_rng(3)
    at = np.sort(np.concatenate([rng.uniform(0, 15, 140), rng.uniform(15, 100, 8), rng.uniform(80, 95, 140)]))
    return lorrery.Requests(
        at_seconds=at,
        prompt_tokens=rng.integers(16, 512, len(at)),
        output_tokens=rng.integers(16, 200, len(at)),
        adapter_id=[f"lora-{int(one)}" for one in rng.integers(12, size=len(at))],
    )


def run(*overrides: str, workers: int | None = 1, **given) -> SimulationResult:
    return lorrery.simulate(CLUSTER, bursts(), workers=workers, overrides=overrides, **given)


WAYS = {
    "usual": (),
    "percentile": (
        "autoscaler.metric=time_to_first_token_seconds_p90",
        "autoscaler.target=0.5",
        "autoscaler.window_seconds=20",
    ),
    "cache": (
        "autoscaler.metric=kv_cache_usage_perc",
        "autoscaler.target=0.3",
        "scheduler.policy=fcfs",
        "scheduler.memory=paged",
        "scheduler.batching=chunked",
        "scheduler.prefix_cache.kind=blocks",
        "scheduler.max_total_token_num=6000",
    ),
    "moving": ("scheduler.placement=predicted_finish", "autoscaler.metrics={generation_tokens_per_second = 200}"),
    "strict": ("scheduler.strict=true",),
    "two schedulers": ("router.schedulers=['one:1', 'two:2']", "autoscaler.min_replicas=2", "autoscaler.target=0.5"),
    "to zero": (
        "autoscaler.min_replicas=0",
        "autoscaler.cooldown_seconds=10",
        "autoscaler.metrics={num_requests_running = 8}",
    ),
    "seen late": ("autoscaler.scrape_interval_seconds=2", "autoscaler.metrics_delay_seconds=1"),
    "drains are cut": ("worker.drain_seconds=0.5",),
    "faults": (
        "scheduler.max_worker_losses=9",
        (
            "faults=['worker_loss,at=8,worker=worker-0', 'worker_loss,at=20,worker=worker-1',"
            " 'freeze_worker,at=12,worker=worker-2,for=40', 'worker_loss,at=40,worker=worker-2',"
            " 'slow_worker,at=0,worker=worker-3,factor=3', 'freeze_worker,at=85,worker=worker-0,for=9']"
        ),
    ),
    "groups": (
        (
            "workers=[{count = 2}, {gpu = 'L4', autoscaler = {target = 1, sync_period_seconds = 7}},"
            " {gpu = 'L4', gpus = 2, autoscaler = {enabled = false}}]"
        ),
        "faults=['worker_loss,at=20,worker=worker-3', 'worker_loss,at=9,worker=worker-1']",
        "scheduler.placement=predicted_finish",
    ),
}


@pytest.mark.parametrize("overrides", WAYS.values(), ids=WAYS.keys())
def test_jumping_is_stepping_with_workers_that_come_and_go_and_no_request_is_lost(overrides: tuple[str, ...]):
    workers = 2 if "autoscaler.min_replicas=2" in overrides else 1
    if any(one.startswith("workers=") for one in overrides):
        workers = None
    jumping, stepping = run(*overrides, workers=workers), run(*overrides, workers=workers, one_step=True)
    assert jumping.cost.num_plans < stepping.cost.num_plans
    ours, theirs = jumping.scaling, stepping.scaling
    assert ours is not None
    assert theirs is not None
    assert list(ours.timeline) == list(theirs.timeline)
    assert ours == theirs
    assert jumping.columns.end_seconds.tolist() == stepping.columns.end_seconds.tolist()
    assert jumping.columns.worker_id.tolist() == stepping.columns.worker_id.tolist()
    assert ours.summary.num_scale_ups > 0
    assert ours.summary.num_scale_downs > 0
    assert jumping.counts["num_completed"] == jumping.counts["num_requests"]
    least = int("autoscaler.min_replicas=0" not in overrides) * (workers or 1)
    for row in ours.timeline:
        assert least <= row.desired <= 6
        assert row.ready + row.starting <= 6
    assert len(set(jumping.columns.worker_id)) > (workers or 4)


def test_a_rule_holds_while_no_worker_serves():
    """With no worker's word for it nothing is too many; only what waits for any worker says that more are wanted."""
    fixed = ("autoscaler.metric=num_requests_running", "autoscaler.scale_down_stabilization_seconds=0")
    lost = [f"worker_loss,at=12,worker=worker-{number}" for number in range(3)]
    found = run(*fixed, "autoscaler.target=8", "autoscaler.max_replicas=3", workers=3, faults=lost)
    assert found.scaling is not None
    blind = [row for row in found.scaling.timeline if not row.ready]
    assert [(row.seconds, row.starting, row.desired) for row in blind] == [(15, 3, 3)]


def test_a_run_is_the_same_each_time():
    one, other = run(), run()
    assert one.scaling == other.scaling
    assert one.columns.end_seconds.tolist() == other.columns.end_seconds.tolist()


def test_gpu_hours_count_from_the_start_of_a_worker_until_it_has_gone():
    fixed = run("autoscaler.min_replicas=3", "autoscaler.max_replicas=3", workers=3)
    assert fixed.scaling is not None
    own = fixed.scaling.summary
    assert (own.replicas_min, own.replicas_mean, own.replicas_max) == (3, 3.0, 3)
    assert own.gpu_hours == pytest.approx(3 * fixed.columns.end_seconds.max() / 3600)
    assert fixed.columns.end_seconds.tolist() == run("autoscaler.enabled=false", workers=3).columns.end_seconds.tolist()
    # 16 GB of weights at 8 GB/s, and 3 s
    assert own.start_up_seconds == pytest.approx(3 + 16.06 / 8, abs=0.02)
    doubled = run("autoscaler.min_replicas=2", "autoscaler.max_replicas=2", "worker.tensor_parallel=2", workers=2)
    assert doubled.scaling is not None
    assert doubled.scaling.summary.gpu_hours == pytest.approx(4 * doubled.columns.end_seconds.max() / 3600)


def test_a_start_that_the_run_does_not_live_to_see_counts_until_its_last_request():
    found = run("autoscaler.start_seconds=36000")
    assert found.scaling is not None
    own, end = found.scaling.summary, float(found.columns.end_seconds.max())
    assert own.num_scale_ups > 0
    assert (own.replicas_min, own.replicas_mean, own.replicas_max) == (1, 1.0, 1)
    assert end / 3600 < own.gpu_hours <= 6 * end / 3600
    (_, used), _ = scaling_lines(found.scaling)
    assert "GPU hours of workers that start, serve or drain; 1 to 1 worker processes serve, 1.00 on average;" in used


def test_the_longest_times_that_may_be_set_are_times_of_a_simulation():
    longest = ("start_seconds", "sync_period_seconds", "window_seconds", "scale_down_stabilization_seconds")
    found = run(*(f"autoscaler.{name}=1e6" for name in longest), "worker.drain_seconds=1e6")
    assert found.scaling is not None
    assert len(found.scaling.timeline) == 1
    assert found.counts["num_completed"] == found.counts["num_requests"]


def test_a_worker_serves_once_its_weights_are_read_and_one_that_drains_gets_nothing_new():
    found = run()
    assert found.scaling is not None
    first_up = next(row for row in found.scaling.timeline if row.desired > 1)
    others = found.columns.worker_id != "worker-0"
    ready = first_up.seconds + found.scaling.summary.start_up_seconds
    assert found.columns.end_seconds[others].min() > ready
    assert {row.starting for row in found.scaling.timeline} > {0}


def test_a_worker_that_is_lost_starts_anew_at_once_and_serves_after_a_start():
    fixed = ("autoscaler.min_replicas=2", "autoscaler.max_replicas=2")
    found = run(*fixed, workers=2, faults=["worker_loss,at=7,worker=worker-1"])
    assert found.scaling is not None
    own = found.scaling.summary
    ready = 7 + own.start_up_seconds
    assert [row.ready for row in found.scaling.timeline if row.seconds < 30] == [2, 2, 1, 2, 2, 2]
    columns = found.columns
    ends = columns.end_seconds[columns.worker_id == "worker-1"]
    assert not ((ends > 7) & (ends < ready)).any()
    assert ((ends > ready) & (ends < 40)).any()
    assert (own.replicas_min, own.replicas_max, own.num_scale_ups) == (1, 2, 0)
    assert own.gpu_hours == pytest.approx(2 * float(columns.end_seconds.max()) / 3600)
    # One that is lost while it starts begins anew; one that nobody has started is not lost.
    again = run(*fixed, workers=2, faults=["worker_loss,at=7,worker=worker-1", "worker_loss,at=11,worker=worker-1"])
    assert again.scaling is not None
    assert [row.ready for row in again.scaling.timeline if row.seconds < 30] == [2, 2, 1, 1, 2, 2]
    never = run("autoscaler.max_replicas=6", faults=["worker_loss,at=0.5,worker=worker-5"])
    assert never.scaling == run("autoscaler.max_replicas=6").scaling
    group = "workers=[{autoscaler = {max_replicas = 12}}]"
    alone = run(group, workers=None, faults=["worker_loss,at=0.5,worker=worker-11"])
    assert alone.scaling == run(group, workers=None).scaling


def test_each_group_has_a_rule_of_its_own_and_sees_its_own_workers():
    groups = "workers=[{count = 2, gpu = 'A10G'}, {gpu = 'L4', autoscaler = {enabled = false}}]"
    found = run(groups, "autoscaler.max_replicas=4", "autoscaler.target=1", workers=None)
    assert found.scaling is not None
    own, timeline = found.scaling.summary, found.scaling.timeline
    assert {row.group for row in timeline} == {"A10G"}
    assert own.replicas_max == max(row.ready for row in timeline) + 1
    assert own.num_scale_ups > 0
    assert sum(found.columns.worker_id == "worker-2") > 0
    groups = "workers=[{gpu = 'A10G'}, {gpu = 'L4', autoscaler = {target = 0.5}}]"
    both = run(groups, "autoscaler.target=50", workers=None)
    assert both.scaling is not None
    rows = both.scaling.timeline
    assert {row.group for row in rows} == {"A10G", "L4"}
    most = {row.group: row.desired for row in sorted(rows, key=lambda row: row.desired)}
    assert most["L4"] > most["A10G"]  # it wants fewer to wait
    # What a group's rule does not see it does not count: all rates together are the cluster's.
    rates = ("autoscaler.metric=request_success_per_second", "autoscaler.target=1000", "autoscaler.window_seconds=500")
    one, two = [run(kinds, *rates, workers=None) for kinds in ("workers=[{count = 2}]", "workers=[{}, {gpu = 'L4'}]")]
    for result, names in ((one, [""]), (two, ["A10G", "L4"])):
        assert result.scaling is not None
        last = {row.group: row for row in result.scaling.timeline}
        at = last[names[0]].seconds
        counted = sum((last[name].values[0] or 0.0) * last[name].ready * at for name in names)
        assert counted == pytest.approx(int((result.columns.end_seconds <= at).sum()))


def test_the_timeline_names_groups(tmp_path: Path):
    paths = run("workers=[{}, {gpu = 'L4'}]", workers=None).write(tmp_path)
    with paths[2].open(encoding="utf-8") as file:
        assert {row["group"] for row in csv.DictReader(file)} == {"A10G", "L4"}


def test_a_rule_sees_what_was_scraped_as_late_as_it_is_told():
    fresh, late = run(), run("autoscaler.scrape_interval_seconds=4", "autoscaler.metrics_delay_seconds=6")
    every, now = run("autoscaler.sync_period_seconds=2"), fresh.scaling
    assert late.scaling is not None
    assert every.scaling is not None
    assert now is not None
    assert [row.values for row in late.scaling.timeline[:2]] == [(None,), (None,)]  # the first, of 2 s, is seen at 8 s
    # Until the first decision that differs both clusters are the same: at 10 s it sees 2 s, at 15 s 6 s.
    waiting = {row.seconds: row.num_requests_waiting for row in every.scaling.timeline}
    first = next(row.seconds for row in every.scaling.timeline if row.desired > 1)
    assert first >= 2
    assert late.scaling.timeline[2].values == (waiting[2],)
    up = [next(row.seconds for row in one.timeline if row.desired > 1) for one in (now, late.scaling)]
    assert up[0] < up[1] <= up[0] + 15


def test_two_gpus_in_a_process_come_and_go_together():
    found = run("worker.gpus=2", "autoscaler.target=0.5")
    assert found.scaling is not None
    names = set(found.columns.worker_id)
    assert {"worker-0.0", "worker-0.1", "worker-1.0", "worker-1.1"} <= names
    assert found.counts["num_completed"] == found.counts["num_requests"]


def test_the_timeline_is_written_beside_the_report(tmp_path: Path):
    paths = run().write(tmp_path)
    assert [path.name for path in paths] == ["summary.json", "requests.csv", "scaling.csv", "adapters.csv"]
    with paths[2].open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["seconds"] == "0"
    assert rows[1]["metric:num_requests_waiting"]
    assert {int(row["desired"]) for row in rows} > {1}


@pytest.mark.parametrize(
    ("overrides", "given", "words"),
    [
        (("autoscaler.min_replicas=9",), {}, "min_replicas is 9, max_replicas 6"),
        (("autoscaler.min_replicas=0", "autoscaler.metric=num_requests_running"), {}, "only num_requests_waiting"),
        (("autoscaler.metric=cpu",), {}, "none of num_requests_waiting"),
        (
            ("autoscaler.sync_period_seconds=1e-13",),
            {},
            "sync_period_seconds: .* greater than or equal to 0.1, got 1e-13",
        ),
        (("autoscaler.scrape_interval_seconds=1e-3",), {}, "scrape_interval_seconds is 0.001: it must be 0"),
        (("autoscaler.metrics_delay_seconds=6",), {}, "metrics_delay_seconds is 6, and scrape_interval_seconds 0"),
        (("autoscaler.sync_period_seconds=1e300",), {}, "less than or equal to 1000000, got 1e\\+300"),
        (("autoscaler.start_seconds=1e300",), {}, "start_seconds: .* less than or equal to 1000000"),
        (("autoscaler.window_seconds=inf",), {}, "window_seconds: .* finite number, got inf"),
        (("autoscaler.window_seconds=nan",), {}, "window_seconds: .*, got nan"),
        (("autoscaler.disk_gb_per_second=1e-300",), {}, "disk_gb_per_second: .* greater than or equal to 0.01"),
        (("autoscaler.target=1e-300",), {}, "target: .* greater than or equal to 0.000001"),
        (("autoscaler.metrics={num_requests_running = 1e300}",), {}, "less than or equal to 1000000000000"),
        (("autoscaler.max_replicas=1000000",), {}, "max_replicas: .* less than or equal to 10000, got 1000000"),
        (("autoscaler.scale_up_percent=99999999",), {}, "scale_up_percent: .* less than or equal to 10000"),
        (("autoscaler.metrics={num_requests_waiting = 3}",), {}, "num_requests_waiting is also in metrics"),
        (("workers=[{count = 9}]",), {"workers": None}, "workers.0 has count 9, and the autoscaler keeps 1 to 6"),
        (("workers=[{autoscaler = {target = 0}}]",), {"workers": None}, "workers.0.autoscaler.target: .*, got 0"),
        (("workers=[{autoscaler = {aim = 1}}]",), {"workers": None}, "workers.0.autoscaler.aim"),
        ((), {"workers": 7}, "keeps 1 to 6"),
        ((), {"faults": ["worker_loss,at=3,worker=worker-0,for=9"]}, "replaced at once, .*: leave out for"),
        (("worker.gpus=2",), {"faults": ["worker_loss,at=3,worker=worker-0.1"]}, "be lost, worker=worker-0"),
        ((), {"faults": ["worker_loss,at=3,worker=worker-6"]}, "no such worker"),
        (
            ("workers=[{autoscaler = {max_replicas = 4}}]",),
            {"workers": None, "faults": ["worker_loss,at=3,worker=worker-4"]},
            "no such worker; there are worker-0$",
        ),
        (
            ("workers=[{}, {gpu = 'L4'}]",),
            {"workers": None, "faults": ["worker_loss,at=3,worker=worker-2"]},
            "no such worker; there are worker-0, worker-1$",
        ),
        (("router.schedulers=['one:1', 'two:2']",), {"workers": 2}, "set it to 2"),
    ],
)
def test_what_cannot_be_is_refused_with_its_cure(overrides: tuple[str, ...], given: dict[str, object], words: str):
    with pytest.raises(SettingsError, match=words):
        run(*overrides, **given)


@pytest.mark.parametrize(
    ("ttft", "output_tokens", "took", "status", "is_good"),
    [
        (2.0, 5, 0.5, "OK", True),  # both limits, to the last: an eighth of a second for each of four gaps
        (2.0, 5, 0.51, "OK", False),
        (2.01, 5, 0.5, "OK", False),
        (2.0, 1, 0.0, "OK", True),  # it has no gap
        (2.0, 5, 0.5, "CANCELLED", False),
    ],
)
def test_a_request_is_good_within_both_limits(
    ttft: float, output_tokens: int, took: float, status: str, is_good: bool
) -> None:
    outcome = RequestOutcome(
        index=0,
        prompt_tokens=8,
        intended_seconds=1.0,
        sent_seconds=1.5,
        end_seconds=9.0,
        status=status,
        message_seconds=np.array([1.0 + ttft, *[1.0 + ttft + took] * (output_tokens > 1)]),
        message_tokens=np.array([1, *[output_tokens - 1] * (output_tokens > 1)]),
    )
    assert good_ratio(OutcomeTable.of([outcome]), 2.0, 0.125) == is_good


@pytest.mark.parametrize(("ready", "usage", "waiting"), [(4, 0.5, 3.0), (1, 2.0, 12.0), (0, 2.0, 12.0)])
def test_a_row_of_the_timeline_has_what_a_replica_has_of_each_total(ready: int, usage: float, waiting: float) -> None:
    sample = Sample(30.0, ready, num_requests_waiting=12, kv_cache_usage_perc=2.0)
    readings = {
        "num_requests_waiting": Reading(12.0, True, ready),
        "time_to_first_token_seconds_p90": Reading(0.7, is_total=False),
    }
    row = scaling_row(sample, Decision(5, 6, "why"), [*readings, "generation_tokens_per_second"], readings)
    assert (row.kv_cache_usage_perc, row.num_requests_waiting) == (usage, 12)
    assert row.values == (waiting, 0.7, None)
    assert (row.desired, row.recommended) == (5, 6)
