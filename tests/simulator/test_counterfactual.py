"""Recorded traffic under other settings: what follows it, what is compared, and that nothing else changes."""

import asyncio
import csv
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import lorrery
from lorrery.service.errors import FormatError, SettingsError
from lorrery.service.settings.cluster import load
from lorrery.simulator.counterfactual import AskedOf, prepare_counterfactual
from lorrery.v1 import scheduler_pb2 as pb
from tests.simulator.recorded import COMMON, WAYS, read_lines, run_live, write_lines
from tests.simulator.virtual_cluster import VirtualCluster
from tests.virtual.clock import virtual_time

WITHOUT_EFFECT = {"scheduler.worker_timeout_seconds": 9}
"""Has the journal simulated, not replayed."""
FIGURES = (
    *("ttft_seconds", "tpot_seconds", "e2e_seconds", "end_seconds", "queue_seconds", "adapter_load_seconds"),
    *("prefill_seconds", "decode_seconds", "cached_tokens", "num_requeues", "output_tokens"),
    *("status", "finish_reason", "tenant_id", "adapter_id"),
)


class Punctual(random.Random):
    """Chance under which timers fire in time and nothing stands still."""

    def random(self) -> float:
        return 0.999

    def uniform(self, a: float, b: float) -> float:
        return a

    def expovariate(self, lambd: float = 1.0) -> float:
        return 0.0


async def punctual(settings: lorrery.Settings, rng: random.Random, num_requests: int = 40) -> None:
    cluster = VirtualCluster(settings, rng, 0.0, 0)
    for _ in range(2):
        cluster.attach()
    await asyncio.sleep(0.1)
    for number in range(num_requests):
        await asyncio.sleep(rng.expovariate(20))
        most = rng.randint(1, 60)
        sampling = pb.Sampling(seed=number, max_new_tokens=most, ignore_eos=rng.random() < 0.4)
        if not sampling.ignore_eos:
            sampling.true_output_tokens = rng.randint(1, most)
        prompt = list(range(3, rng.randint(4, 203))) + [rng.randint(3, 900) for _ in range(rng.randint(0, 40))]
        cluster.submit(sampling, prompt, rng.choice(["", *cluster.cluster.core.adapters]))
    async with asyncio.timeout(1000):
        await cluster.over()
    await cluster.close()
    assert not cluster.errors


def recorded(way: str, folder: Path) -> Path:
    """Write the journal of a live cluster whose messages take no time."""
    path = folder / "journal.jsonl"
    settings = load(None, [*COMMON, *WAYS[way], f"scheduler.journal='{path}'"])
    with virtual_time(Punctual(1)) as loop:
        loop.run_until_complete(punctual(settings, random.Random(way)))
    return path


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded("chunked blocks", tmp_path_factory.mktemp("journal"))


@pytest.mark.parametrize(
    "way", ["req_queue slora_loop", "mixed", "chunked paged", "chunked blocks", "llm_mock", "peft", "spelt", "echo"]
)
def test_a_simulation_of_unchanged_traffic_gives_what_a_punctual_cluster_gave(way: str, tmp_path: Path) -> None:
    result = lorrery.counterfactual(recorded(way, tmp_path), overrides=WITHOUT_EFFECT)
    assert result.simulated.cost.num_steps
    for name in FIGURES:
        live, simulated = (getattr(one.columns, name) for one in (result.recorded, result.simulated))
        np.testing.assert_array_equal(live, simulated, err_msg=name)


def test_held_outputs_have_the_times_of_their_last_tokens(tmp_path: Path) -> None:
    result = lorrery.counterfactual(recorded("static", tmp_path), overrides=WITHOUT_EFFECT)
    live, simulated = result.recorded.columns, result.simulated.columns
    assert (live.arrival_seconds + live.e2e_seconds < live.end_seconds - 0.01).any()
    np.testing.assert_allclose(live.tpot_seconds, simulated.tpot_seconds, rtol=1e-9)


@pytest.mark.parametrize("overrides", [(), ["worker.gpu=A10G"], {"scheduler.memory": "paged"}])
def test_what_changes_nothing_is_replayed_and_has_no_difference(
    journal: Path, overrides: Mapping[str, object] | list[str]
) -> None:
    prepared = prepare_counterfactual(AskedOf(journal, overrides=overrides, workers=2))
    assert prepared.run is None
    assert prepared.replay().differences == []
    result = lorrery.counterfactual(journal, overrides=overrides)
    assert {(one.difference_ms, one.low_ms, one.high_ms, one.faster_ratio) for one in result.differences} == {
        (0.0, 0.0, 0.0, 0.0)
    }


def test_a_changed_journal_that_does_not_replay_is_an_error(journal: Path, tmp_path: Path) -> None:
    lines = read_lines(journal)
    next(line for line in lines if line.get("type") == "steps")["durations_ps"][0] += 1
    with pytest.raises(lorrery.LorreryError, match=r"tampered.jsonl:\d+: step: "):
        lorrery.counterfactual(write_lines(tmp_path, lines))


def test_another_gpu_policy_or_number_of_workers_is_compared_request_by_request(journal: Path) -> None:
    faster = lorrery.counterfactual(journal, overrides={"worker.gpu": "H100-SXM"})
    every = {one.metric: one for one in faster.differences if one.group == "all"}
    assert every["e2e"].num_pairs == 40
    assert every["e2e"].faster_ratio == 1.0
    assert every["e2e"].high_ms < 0
    assert every["e2e"].difference_ms == pytest.approx(every["e2e"].simulated_ms - every["e2e"].recorded_ms)
    alone = lorrery.counterfactual(journal, workers=1)
    assert set(alone.simulated.columns.worker_id) == {"worker-0"}
    assert next(one for one in alone.differences if one.metric == "e2e").low_ms > 0
    names = {one.name for one in faster.differences if one.group == "adapter"}
    assert names == {"", "a-0", "a-1", "a-2", "big"}


def test_the_files_have_a_line_for_each_request_and_the_recorded_run_beside(journal: Path, tmp_path: Path) -> None:
    result = lorrery.counterfactual(journal, workers=1)
    written = {path.relative_to(tmp_path).as_posix() for path in result.write(tmp_path)}
    assert {"summary.json", "paired.csv", "differences.csv", "recorded/summary.json"} <= written
    rows = list(csv.DictReader((tmp_path / "paired.csv").read_text().splitlines()))
    assert [row["request_id"] for row in rows[:2]] == ["r1", "r2"]
    ttft = result.simulated.columns.ttft_seconds - result.recorded.columns.ttft_seconds
    np.testing.assert_allclose([float(row["difference_ttft_ms"]) for row in rows], ttft * 1e3, atol=1e-5)
    groups = list(csv.DictReader((tmp_path / "differences.csv").read_text().splitlines()))
    assert [(row["group"], row["metric"]) for row in groups[:3]] == [("all", "ttft"), ("all", "tpot"), ("all", "e2e")]
    assert lorrery.report(tmp_path / "recorded", tmp_path, file=tmp_path / "page.html").exists()


def test_cancels_keep_their_time_and_stop_strings_their_tokens(tmp_path: Path) -> None:
    path = run_live(WAYS["chunked blocks"], "cuts", tmp_path, cuts=True)[0]
    lines = read_lines(path)
    handles = [line["handle"] for line in lines if line.get("type") == "request"]
    left = {line["handle"] for line in lines if line.get("type") == "cancel" and line["cause"] == "client_left"}
    kept = {line["handle"] for line in lines if line.get("type") == "cancel" and line["cause"] == "stop_text"}
    result = lorrery.counterfactual(path, overrides={"worker.gpu": "H100-SXM"}).simulated.columns
    index = {handle: row for row, handle in enumerate(handles)}
    cancelled = [index[handle] for handle in left if result.status[index[handle]] == "CANCELLED"]
    assert cancelled
    stopped = [index[handle] for handle in kept - left]
    assert stopped
    assert set(result.output_tokens[stopped]) == {1}
    lasted = result.end_seconds[cancelled] - result.arrival_seconds[cancelled]
    stamps = {line["handle"]: line["at_ps"] for line in lines if line.get("type") == "cancel"}
    arrivals = {line["handle"]: line["at_ps"] for line in lines if line.get("type") == "request"}
    expected = [(stamps[handles[row]] - arrivals[handles[row]]) / 1e12 for row in cancelled]
    np.testing.assert_allclose(lasted, expected, atol=1e-9)


def test_workers_come_and_go_as_they_did_unless_their_number_is_given(journal: Path, tmp_path: Path) -> None:
    lines = read_lines(journal)
    requests = [line for line in lines if line.get("type") == "request"]
    lost_ps = requests[20]["at_ps"]
    attached = [line for line in lines if line.get("type") == "attached"]
    before = lines.index(requests[20])
    lost = {"type": "lost", "worker": 1, "at_ps": lost_ps, "num_steps": 0, "boundary_ps": 0, "requeued": []}
    again = attached[1] | {"worker": 2, "at_ps": requests[30]["at_ps"]}
    gone = write_lines(tmp_path, [*lines[:before], lost, *lines[before:]])
    result = lorrery.counterfactual(gone, overrides=WITHOUT_EFFECT).simulated.columns
    assert set(result.worker_id[:20]) == {"worker-0", "worker-1"}
    assert set(result.worker_id[20:]) == {"worker-0"}
    back = write_lines(tmp_path, [*lines[:before], lost, *lines[before:-1], again, lines[-1]])
    assert "worker-1" in lorrery.counterfactual(back, overrides=WITHOUT_EFFECT).simulated.columns.worker_id[30:]
    three = lorrery.counterfactual(gone, workers=3).simulated.columns
    assert set(three.worker_id[20:]) == {"worker-0", "worker-1", "worker-2"}


def test_workers_of_several_kinds_become_groups(journal: Path, tmp_path: Path) -> None:
    lines = read_lines(journal)
    for line in lines:
        if line.get("type") == "attached" and line["worker"] == 1:
            line["hello"] |= {"gpu": "H100-SXM"}
    prepared = prepare_counterfactual(AskedOf(write_lines(tmp_path, lines), overrides=WITHOUT_EFFECT))
    assert prepared.run is not None
    assert [(group.count, group.overrides.get("gpu")) for group in prepared.run.settings.workers] == [
        (1, None),
        (1, "H100-SXM"),
    ]
    with pytest.raises(SettingsError, match=r"3 workers are asked for, and the settings have 2 groups"):
        lorrery.counterfactual(tmp_path / "tampered.jsonl", workers=3)


def test_adapters_loaded_at_run_time_exist(tmp_path: Path) -> None:
    path = next(
        path
        for seed in range(9)
        if '"late-adapter"' in (path := run_live(WAYS["mixed"], f"late {seed}", tmp_path)[0]).read_text()
    )
    result = lorrery.counterfactual(path, overrides={"worker.gpu": "H100-SXM"}).simulated.columns
    assert "OK" in result.status[result.adapter_id == "late-adapter"]


def test_what_the_journal_does_not_have_is_said(tmp_path: Path) -> None:
    path = recorded("mixed", tmp_path)
    lines = read_lines(path)
    lines.insert(-1, {"type": "refused", "at_ps": 1, "request_id": "r", "reason": "queue_full"})
    caches = {"scheduler.prefix_cache.kind": "blocks", "scheduler.memory": "paged"}
    result = lorrery.counterfactual(write_lines(tmp_path, lines[:-1]), overrides=caches)
    said = "\n".join(result.simulated.warnings)
    assert "has no end" in said
    assert "left out: 1 requests that were refused on arrival" in said
    assert "the journal has no prompts" in said
    assert result.simulated.columns.cached_tokens.sum() == 0
    assert (result.simulated.columns.status == "OK").all()


def test_a_journal_without_requests_or_workers_is_refused(journal: Path, tmp_path: Path) -> None:
    lines = [line for line in read_lines(journal) if line.get("type") in ("attached", "end") or "kind" in line]
    with pytest.raises(FormatError, match="there is nothing to play"):
        lorrery.counterfactual(write_lines(tmp_path, lines))


def test_the_autoscaler_may_scale_recorded_traffic(journal: Path) -> None:
    overrides = {"autoscaler.enabled": True, "autoscaler.target": 1, "autoscaler.start_seconds": 0.1}
    result = lorrery.counterfactual(journal, overrides=overrides)
    assert result.simulated.scaling is not None
    assert (result.simulated.columns.status == "OK").all()
