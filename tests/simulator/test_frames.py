"""A simulation's record: what a watcher would have seen, the same whether the simulation jumps or not."""

from pathlib import Path

import numpy as np
import pytest

import lorrery
from lorrery.service.errors import SettingsError
from lorrery.view.frame import Frame
from lorrery.view.record import Record

CLUSTER = {
    "model": "Llama-3-8B",
    "worker": {"gpu": "A10G"},
    "adapters": {"registry": [{"id": "lora", "rank": 16, "count": 12}], "max_loras": 2},
    "scheduler": {"max_req_input_len": 1024, "max_req_total_len": 2048},
    "router": {"schedulers": ["one:1", "two:2"]},
}
LOAD = {"rate": 8, "duration": 6, "adapters": "all", "input_range": "16:256", "output_range": "16:128", "seed": 3}
FAULTS = ("worker_loss,at=2,worker=worker-2,for=2", "slow_worker,at=3,worker=worker-0,factor=2,for=2")


def recorded(folder: Path, name: str, *overrides: str, every: float | None = 0.3, load=LOAD, settings=CLUSTER, **given):
    path = folder / name
    arguments = {"workers": 4, "overrides": overrides, "faults": FAULTS} | given
    result = lorrery.simulate(settings, load, record=path, record_every=every, **arguments)
    return result, Record(path)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("scheduler.policy=vtc_fair", "scheduler.placement=round_robin"),
        (
            "scheduler.policy=fcfs",
            "scheduler.batching=chunked",
            "scheduler.memory=paged",
            "scheduler.max_total_token_num=3000",
        ),
        ("scheduler.strict=true",),
        ("scheduler.policy=fcfs", "scheduler.prefix_cache.kind=blocks", "adapters.loading=blocking"),
    ],
    ids=["usual", "fair", "paged", "strict", "blocks"],
)
def test_frames_between_decisions_are_those_of_the_one_step_oracle(tmp_path: Path, overrides: tuple[str, ...]):
    jumping, record = recorded(tmp_path, "jump", *overrides)
    stepping, oracle = recorded(tmp_path, "step", *overrides, one_step=True)
    assert jumping.cost.num_plans < stepping.cost.num_plans
    assert record.hello == oracle.hello
    for frame, other in zip(record.frames(), oracle.frames(), strict=True):
        assert frame == other, frame.at
    alone = lorrery.simulate(CLUSTER, LOAD, workers=4, overrides=overrides, faults=FAULTS)
    assert alone.columns.end_seconds.tolist() == jumping.columns.end_seconds.tolist()


def test_a_prefix_that_many_share_is_in_the_pool_once(tmp_path: Path):
    shared = ("scheduler.policy=fcfs", "scheduler.batching=mixed", "scheduler.memory=paged")
    shared += ("scheduler.prefix_cache.kind=blocks", "scheduler.max_total_token_num=3000")
    one = CLUSTER | {"router": {}}
    load = LOAD | {"shared_prefix": "512:1", "input_range": "8:64", "rate": 40, "adapters": None}
    _, record = recorded(tmp_path, "r", *shared, load=load, workers=1, faults=(), settings=one)
    workers = [frame.workers[0] for frame in record.frames()]
    assert max(sum(row.prompt_tokens for row in worker.running) for worker in workers) > 2 * 3000
    assert 2000 < max(worker.kv for worker in workers) <= 3000
    assert workers[-1].kv == 0


def test_counts_phases_names_and_events_add_up_to_the_report(tmp_path: Path):
    result, record = recorded(tmp_path, "r")
    frames = list(record.frames())
    last = frames[-1]
    assert [frame.at for frame in frames[:3]] == [0.0, 0.3, 0.6]
    assert (record.hello.frame_seconds, record.hello.last) == (0.3, last.at)
    assert [shard.address for shard in last.shards] == ["one:1", "two:2"]
    counts = result.counts
    assert last.totals.requests == counts["num_requests"] == last.totals.finished
    assert last.totals.output_tokens == counts["output_tokens"]
    assert last.totals.prompt_tokens == counts["input_tokens"]
    ended = [row for frame in frames for row in frame.ended]
    assert len(ended) + sum(frame.ended_more for frame in frames) == counts["num_requests"]
    columns = result.columns
    for row in ended:
        number = columns.index.tolist().index(row.request)
        assert row.arrived == pytest.approx(columns.arrival_seconds[number], abs=2e-6)
        phases = row.queue + row.adapter_load + row.prefill + row.decode
        assert phases == pytest.approx(columns.end_seconds[number] - columns.arrival_seconds[number], abs=5e-6)
    names = [name for frame in frames for name in frame.adapters_new]
    assert len(names) == len(set(names)) > 8
    kinds = {event.kind for frame in frames for event in frame.events}
    assert kinds >= {"load", "evict", "worker_lost", "worker_joined", "fault"}
    assert sum(row.loads for row in last.adapters) == last.totals.loads > len(names)
    assert {len(frame.workers) for frame in frames} == {3, 4}
    assert all(_is_sane(frame, len(names)) for frame in frames)


def _is_sane(frame: Frame, num_names: int) -> bool:
    rows = [row for worker in frame.workers for row in worker.running]
    assert len({row.request for row in rows}) == len(rows)
    assert sum(row.running for row in frame.tenants) == len(rows) == sum(row.running for row in frame.adapters)
    assert all(-1 <= row.adapter < num_names for row in rows)
    assert all(0 <= worker.kv <= worker.pool for worker in frame.workers)
    assert all((worker.kind == "idle") == (worker.step == 0) or worker.tokens == 0 for worker in frame.workers)
    return True


def test_faults_missing_workers_and_objectives_are_those_of_the_run(tmp_path: Path):
    faults = (*FAULTS, "delay,seconds=3,share=0.5", "refuse,first=5")
    result, record = recorded(tmp_path, "r", faults=faults)
    frames = {round(frame.at, 1): frame for frame in record.frames()}
    assert [row.rule for row in frames[3.0].faults] == list(faults)
    assert [row.rule for row in frames[6.0].faults] == list(faults[2:])
    assert [(row.shard, row.id, row.gpu, row.lost_at) for row in frames[3.0].missing] == [(0, "worker-2", "A10G", 2.0)]
    assert frames[6.0].missing == []
    columns, rows = result.columns, {row.name: row for row in frames[max(frames)].objectives}
    assert rows["served"].counted == len(columns.completed)
    assert rows["served"].missed == len(columns.completed) - columns.completed.sum() == 5
    ttft = columns.ttft_seconds[~np.isnan(columns.ttft_seconds)]
    assert (rows["ttft"].counted, rows["ttft"].missed) == (len(ttft), (ttft > 2.5).sum())
    assert rows["ttft"].missed > 5


def test_a_long_run_has_no_more_frames_than_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lorrery.view.record.MAX_FRAMES", 40)
    result, record = recorded(tmp_path, "r", every=None)
    frames = list(record.frames())
    assert 15 < len(frames) <= 42
    assert frames[-1].totals.finished == result.counts["num_requests"]
    num_ended = sum(len(frame.ended) + frame.ended_more for frame in frames)
    assert num_ended == result.counts["num_requests"]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"record": "there-is/no-folder"}, "name a file in an existing folder"),
        ({"record": "."}, "that is a folder"),
        ({"record": "r", "record_every": 0.0}, "must be more than 0, and finite"),
        (
            {"record": "r", "record_every": 1e-300},
            "record_every is 1e-300 s; it must be 0.001 to 4,611,686 s; leave it out",
        ),
        ({"record_every": 1.0}, "without record"),
    ],
)
def test_a_record_that_cannot_be_is_refused_before_the_run(given: dict[str, object], word: str):
    with pytest.raises(SettingsError, match=word):
        lorrery.simulate(CLUSTER, LOAD, **given)
