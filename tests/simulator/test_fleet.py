"""Fleets of several kinds of worker: which there are, what each is, and what cannot be."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lorrery.scheduler.core.facts import Handler
from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import Settings, changed, load
from lorrery.simulator.interface import simulate
from lorrery.simulator.loop.worker import StepSpan
from lorrery.worker.build import device_of

H100_AND_L40S: list[dict[str, Any]] = [
    {"gpu": "H100-SXM"},
    {"count": 2, "gpu": "L40S", "weight_dtype": "fp8", "lora": {"launch_us": 1.0}},
]
SETTINGS: dict[str, Any] = {
    "model": "Llama-3-8B",
    "worker": {"kv_dtype": "fp8", "lora": {"padding": "batch"}},
    "adapters": {"registry": [{"id": "a", "rank": 8, "count": 8}]},
    "scheduler": {"max_req_input_len": 2048, "max_req_total_len": 4096, "placement": "round_robin"},
}


def mixed(groups: object = H100_AND_L40S) -> Settings:
    return changed(SETTINGS, {"workers": groups})


class Spans:
    """Notes the steps of each worker."""

    def __init__(self) -> None:
        self.first_ps: dict[str, set[int]] = {}

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {StepSpan: self._ran}

    def _ran(self, span: StepSpan, at_ps: int, member: object) -> None:
        if span.plan.prefills and not span.plan.decode:
            self.first_ps.setdefault(span.worker, set()).add(span.first_ps)


def test_a_group_has_what_worker_says_but_for_what_it_says_itself():
    (h100, one), (l40s, two) = mixed().kinds(3)
    assert (one, two) == (1, 2)
    assert (h100.worker.gpu, h100.worker.weight_dtype, h100.worker.kv_dtype) == ("H100-SXM", "bfloat16", "fp8")
    assert (l40s.worker.gpu, l40s.worker.weight_dtype, l40s.worker.kv_dtype) == ("L40S", "fp8", "fp8")
    assert (l40s.worker.lora.padding, l40s.worker.lora.launch_us) == ("batch", 1.0)
    assert mixed().groups_of_processes(3) == [0, 1, 1]


def test_a_process_is_of_the_group_that_it_is_told_whatever_worker_says(tmp_path: Path, monkeypatch):
    path = tmp_path / "cluster.toml"
    path.write_text('model = "Llama-3-8B"\n[worker]\ngpu = "A10G"\n[[workers]]\n[[workers]]\ngpu = "L40S"\n')
    assert [load(path, [f"worker.group={n}"]).worker.gpu for n in (0, 1)] == ["A10G", "L40S"]
    assert load(path).worker.gpu == "A10G"
    monkeypatch.setenv("LORRERY_WORKER__GROUP", "1")
    monkeypatch.setenv("LORRERY_WORKERS", '[{"gpu": "L4"}, {"gpu": "H200-SXM", "tensor_parallel": 2}]')
    assert (load(path).worker.gpu, load(path).worker.tensor_parallel) == ("H200-SXM", 2)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"count": 0}], "workers.0.count: Input should be greater than or equal to 1, got 0"),
        ([{}, {"gpuu": "L40S"}], "workers.1.gpuu: no such setting"),
        ([{"name": "w"}], "workers.0.name: it is set for all workers, in [worker]"),
        ([{"tensor_parallel": 0}], "workers.0.tensor_parallel: Input should be greater than or equal to 1, got 0"),
        ([{"step_time": "table"}], "workers.0: step_time = 'table' needs profile"),
        ([{"lora": {"padding": 3}}], "workers.0.lora.padding"),
        ({"gpu": "L40S"}, "workers: Input should be a valid tuple"),
    ],
)
def test_a_group_that_cannot_be_is_refused_by_its_number(groups: object, message: str):
    with pytest.raises(SettingsError) as error:
        mixed(groups)
    assert message in str(error.value)


def test_what_every_group_sets_itself_is_refused_for_all_workers(tmp_path: Path, monkeypatch):
    path = tmp_path / "cluster.toml"
    path.write_text('[worker]\ngpu = "A10G"\n[[workers]]\ngpu = "H100-SXM"\n[[workers]]\ngpu = "L40S"\n')
    assert load(path, ["worker.weight_dtype=fp8", "worker.group=1"]).worker.gpu == "L40S"
    assert load(path, ["worker.gpu=L4", "workers=[{}]"]).kinds(1)[0][0].worker.gpu == "L4"
    why = r"worker\.gpu is 'L4', and no worker has it: every group of \[\[workers\]\] sets gpu itself.*"
    for overrides in (["worker.gpu=L4"], ["worker.gpu=L4", 'workers=[{gpu="T4"}, {gpu="A10G"}]']):
        with pytest.raises(SettingsError, match=rf"{why}\(--set\)"):
            load(path, overrides)
    with pytest.raises(SettingsError, match=r"no worker has it: .* sets lora\.launch_us itself"):
        changed(mixed([{"lora": {"launch_us": 1.0}}]), {"worker.lora.launch_us": 2.0})
    monkeypatch.setenv("LORRERY_WORKER__GPU", "L4")
    with pytest.raises(SettingsError, match=rf"{why}\(environment\)"):
        load(path)


def test_a_group_that_is_not_there_is_refused():
    with pytest.raises(SettingsError, match=r"worker\.group is 2; \[\[workers\]\] has 2 groups, counted from 0"):
        changed(mixed(), {"worker.group": 2})


def test_a_gpu_that_the_model_does_not_fit_on_is_named_with_its_group():
    small = mixed([{"gpu": "H100-SXM"}, {"gpu": "T4"}])
    with pytest.raises(
        SettingsError, match=r"workers\.1\.gpu, workers\.1\.tensor_parallel, model: Llama-3-8B does not"
    ):
        simulate(small, {"num_requests": 10})
    with pytest.raises(SettingsError, match=r"workers\.0\.gpu, workers\.0\.engine, model: .*H1000"):
        simulate(mixed([{"gpu": "H1000"}]), {"num_requests": 10})


def test_two_answers_to_how_many_workers_there_are_are_refused():
    assert mixed().num_worker_processes(None) == mixed().num_worker_processes(3) == 3
    assert (mixed([]).num_worker_processes(None), mixed([]).num_worker_processes(7)) == (2, 7)
    with pytest.raises(SettingsError, match=r"4 workers are asked for, .* 2 groups of \[\[workers\]\] with 3 in all"):
        simulate(mixed(), {"num_requests": 10}, workers=4)


def test_a_fault_of_a_worker_that_no_group_has_is_refused():
    with pytest.raises(SettingsError, match="no such worker; there are worker-0, worker-1, worker-2"):
        simulate(mixed(), {"num_requests": 10}, faults=["worker_loss,at=1,worker=worker-3"])


def test_each_worker_takes_the_time_of_its_own_device_and_has_its_own_pool(tmp_path: Path):
    spans = Spans()
    result = simulate(
        mixed(),
        {"num_requests": 60, "rate": 3.0, "adapters": "all", "input_range": (500, 500), "output_range": (10, 10)},
        subscribers=[spans],
        record=tmp_path / "frames.ndjson.gz",
    )
    assert result.report.cluster.workers == (("H100-SXM", 1), ("L40S", 2))
    assert result.report.summary.num_completed == 60
    fastest = {name: min(times) for name, times in spans.first_ps.items()}
    assert fastest["worker-1"] == fastest["worker-2"] > 1.5 * fastest["worker-0"]
    pools = [device_of(kind).pool_tokens for kind, _ in mixed().kinds(3)]
    assert pools[0] > pools[1]


def test_predicted_finish_beats_rules_that_know_no_speed():
    load = {"num_requests": 150, "rate": 6.0, "adapters": "all"}
    mean = {
        name: simulate(mixed(), load, overrides={"scheduler.placement": name}).summary.from_intended.e2e_ms.mean
        for name in ("predicted_finish", "least_loaded", "round_robin")
    }
    assert mean["predicted_finish"] < 0.9 * min(mean["least_loaded"], mean["round_robin"])


def test_predicted_finish_leaves_a_worker_while_it_is_slow_alike_however_steps_are_jumped():
    load = {"num_requests": 150, "rate": 6.0, "adapters": "all"}
    placement, faults = {"scheduler.placement": "predicted_finish"}, ["slow_worker,at=8,worker=worker-0,factor=6,for=6"]
    jumps, steps = (
        simulate(mixed(), load, overrides=placement, faults=faults, one_step=one_step).columns
        for one_step in (False, True)
    )
    assert jumps.end_seconds.tolist() == steps.end_seconds.tolist()
    assert jumps.worker_id.tolist() == steps.worker_id.tolist()
    on_it = [at for at, worker in zip(jumps.arrival_seconds, jumps.worker_id, strict=True) if worker == "worker-0"]
    before, slow, after = (sum(begin <= at < end for at in on_it) for begin, end in ((0, 8), (9, 14), (16, 30)))
    assert before > 30
    assert slow == 0
    assert after > 30


def test_a_prompt_too_long_for_the_small_workers_goes_to_the_large_one():
    few = {"scheduler.max_req_input_len": 400_000, "scheduler.max_req_total_len": 400_010, "scheduler.policy": "fcfs"}
    few |= {"scheduler.max_num_batched_tokens": 400_010, "adapters.registry": []}
    settings = changed(mixed([{"gpu": "L40S"}, {"gpu": "H200-SXM"}, {"gpu": "L40S"}]), few)
    pools = [device_of(kind).pool_tokens for kind, _ in settings.kinds(3)]
    longest = (pools[0] + 10, pools[0] + 10)
    result = simulate(
        settings, {"num_requests": 6, "rate": 1e-3, "timeout": 1e5, "input_range": longest, "output_range": (3, 3)}
    )
    assert result.report.summary.num_completed == 6


def test_gpus_of_a_process_are_workers_of_their_own_with_equal_results():
    hosted = changed({}, {"worker.gpus": 3})
    assert hosted.num_worker_processes(None) == 1
    assert hosted.workers_of_processes(2) == {
        f"worker-{number}": tuple(f"worker-{number}.{gpu}" for gpu in range(3)) for number in range(2)
    }
    load = {"num_requests": 40, "rate": 20.0}
    together, apart = simulate(hosted, load, workers=2), simulate(changed({}, {}), load, workers=6)
    names = dict(zip(hosted.worker_names(2), changed({}, {}).worker_names(6), strict=True))
    assert [names[name] for name in together.columns.worker_id] == list(apart.columns.worker_id)
    # A fault of a process is one of each of its workers.
    lost = simulate(hosted, load, workers=2, faults=["worker_loss,at=0.5,worker=worker-0,for=1"])
    each = [f"worker_loss,at=0.5,worker=worker-{number},for=1" for number in range(3)]
    assert (
        lost.columns.e2e_seconds.tolist()
        == simulate(changed({}, {}), load, workers=6, faults=each).columns.e2e_seconds.tolist()
    )
    assert together.columns.e2e_seconds.tolist() == apart.columns.e2e_seconds.tolist()


def test_groups_may_host_several_gpus_a_process():
    fleet = mixed([{"gpu": "H100-SXM", "gpus": 2}, {"gpu": "L40S", "count": 2}])
    assert [count for _, count in fleet.kinds(3)] == [2, 2]
    assert fleet.worker_names(3) == ["worker-0.0", "worker-0.1", "worker-1", "worker-2"]


def test_the_gpus_of_a_process_belong_to_one_scheduler_and_each_scheduler_needs_a_process():
    groups = [{"gpu": "H100-SXM", "gpus": 3}, {"gpu": "L40S", "gpus": 2}]
    load = {"num_requests": 60, "rate": 6.0, "adapters": "all"}
    columns = simulate(mixed(groups), load, shards=2, overrides=["router.max_shard_load=inf"]).columns
    processes: dict[str, set[str]] = {}
    for adapter, worker in zip(columns.adapter_id, columns.worker_id, strict=True):
        processes.setdefault(adapter, set()).add(worker.partition(".")[0])
    # An adapter's requests all go to one scheduler.
    assert all(len(found) == 1 for found in processes.values())
    assert len(set(columns.worker_id)) == 5
    with pytest.raises(SettingsError, match="3 schedulers have 2 worker processes; each needs one"):
        simulate(mixed(groups), load, shards=3)
