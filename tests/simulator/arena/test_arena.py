"""Candidates on the same requests: figures, what they rank, and why some are equal."""

import math

import pytest

import lorrery
from lorrery.scheduler.core.policies import QUEUES
from lorrery.service.errors import SettingsError
from lorrery.simulator.arena.comparison import Comparison, Contestant

QUEUE_ALONE = ["scheduler.batching=continuous", "scheduler.limits=vllm"]
CALM = {"rate": 4, "duration": 5, "adapters": "all"}
BUSY = {"rate": 40, "duration": 4}
"""Seats are short with `SEATS`."""
SEATS = [*QUEUE_ALONE, "scheduler.max_num_seqs=16"]


def compare(*names: str, overrides: list[str] = QUEUE_ALONE, seeds: int = 2, workers: int = 1, **more: object):
    workload = more.pop("workload", CALM)
    return lorrery.compare(
        candidates=names, overrides=overrides, seeds=seeds, workers=workers, workload=workload, jobs=2, **more
    )


def named(found: Comparison, name: str) -> Contestant:
    return next(one for one in found.contestants if one.name == name)


def test_each_candidate_has_the_figures_of_a_run_of_its_own_with_the_same_requests() -> None:
    found = compare("fcfs", "vtc_fair", overrides=[])
    assert found.seeds == range(42, 44)
    for name in ("fcfs", "vtc_fair"):
        one = named(found, name)
        for seed in found.seeds:
            alone = lorrery.simulate(
                overrides=[f"scheduler.policy={name}"], workload=CALM, workers=1, seed=seed
            ).summary
            assert one.rounds[seed]["ttft_ms_p99"] == alone.from_intended.ttft_ms.p99
            assert one.rounds[seed]["output_tokens_per_second"] == alone.output_tokens_per_second
    digests = {tuple(one.values("workload_digest")) for one in found.ran}
    assert len(digests) == 1
    assert len(set(next(iter(digests)))) == 2


def test_goodput_counts_requests_that_keep_each_bound_in_seconds() -> None:
    found = compare("fcfs", "req_queue", workload=BUSY, overrides=SEATS, slo={"ttft_p99": 0.5, "e2e_p99": 3.0}, seeds=1)
    alone = lorrery.simulate(overrides=["scheduler.policy=fcfs", *SEATS], workload=BUSY, workers=1).columns
    kept = (alone.ttft_seconds <= 0.5) & (alone.e2e_seconds <= 3.0)
    assert 0 < kept.mean() < 1
    assert named(found, "fcfs").values("goodput_ratio") == [pytest.approx(kept.mean())]


def test_first_come_first_served_twice_is_explained_where_nobody_waits() -> None:
    (text,) = compare("fcfs", "req_queue", workload={"rate": 4, "duration": 5}).equal
    assert text.startswith("fcfs and req_queue made the same decisions under all 2 seeds: ")
    assert "Their queues had no choice: whenever requests entered a batch, all that waited at the worker did" in text


def test_and_where_requests_wait() -> None:
    found = compare("fcfs", "req_queue", "priority", "vtc_fair", workload=BUSY, overrides=SEATS)
    (text,) = found.equal
    assert text.startswith("fcfs, req_queue, priority and vtc_fair made the same decisions")
    assert "had no choice" not in text
    for reason in (
        "fcfs goes by arrival",
        "req_queue goes by arrival",
        "priority goes by arrival among requests of one priority, and all have the same",
        "vtc_fair tells only adapters (or tenants) apart, and there is one",
    ):
        assert reason in text
    assert found.verdicts[0] == "goodput: all are equal"


def test_limits_that_differ_and_placements_without_a_choice_are_named() -> None:
    (text,) = compare("fcfs", "fcfs,limits=slora", overrides=["scheduler.batching=continuous"]).equal
    assert "Their limits differ (vllm, max_num_seqs = 256; slora, running_max_req_size = 256) to no effect" in text
    (text,) = compare("least_loaded", "round_robin").equal
    assert "There is one worker, so a placement has no choice" in text


def test_different_decisions_are_not_called_equal() -> None:
    found = compare("fcfs", "docs.examples.shortest_first:ShortestFirst", workload=BUSY, overrides=SEATS)
    assert not found.equal
    fcfs, shortest = found.ran
    assert fcfs.values("num_out_of_order") == [0, 0]
    assert min(shortest.values("num_out_of_order")) > 0


def test_an_order_that_is_within_chance_is_not_separable() -> None:
    found = compare("placement=least_loaded", "placement=power_of_two", workers=2, seeds=3)
    (text,) = [text for text in found.verdicts if text.startswith("output tokens/s")]
    assert "not separable from it" in text
    alone = compare("placement=least_loaded", "placement=power_of_two", workers=2, seeds=1)
    assert math.isinf(alone.ran[0].mean("ttft_ms_p99")[1])
    assert any(text.startswith("one seed: figures have no interval") for text in alone.notes)


@pytest.mark.parametrize("engine", ["vllm", "sglang", None])
def test_regret_is_of_eviction_and_of_placement_and_never_negative(engine: str | None) -> None:
    overrides = ["adapters.max_loras=4", *([f"engine={engine}"] if engine else [])]
    busy = {"rate": 12, "duration": 6, "adapters": "all"}
    found = compare("round_robin", "adapter_hash", workers=2, workload=busy, overrides=overrides)
    for one in found.ran:
        for figures in one.rounds.values():
            evicting, placing = figures["eviction_regret_loads"], figures["placement_regret_loads"]
            assert evicting >= 0
            assert placing >= 0
            assert figures["adapter_loads"] - evicting - placing > 0
    spread, hashed = (one.mean("placement_regret_loads")[0] for one in found.ran)
    assert spread > hashed
    alone = compare("fcfs", "vtc_fair", workload=busy, overrides=["adapters.max_loras=4"])
    assert "placement_regret_loads" not in {measure.name for measure in alone.measures}


def test_a_lost_worker_breaks_no_bound() -> None:
    found = compare(
        "round_robin",
        "adapter_hash",
        workers=3,
        workload={"rate": 20, "duration": 8, "adapters": "all"},
        overrides=["adapters.max_loras=4"],
        faults=["worker_loss,at=3,worker=worker-1,for=2", "adapter_load_failure,at=5,for=1"],
    )
    for one in found.ran:
        assert not one.error
        assert min(one.values("eviction_regret_loads")) >= 0
        assert min(one.values("placement_regret_loads")) >= 0


def test_a_candidate_that_fails_is_told_and_the_others_run() -> None:
    found = compare("fcfs", "tests.simulator.faulty_queues:Exits", "vtc_fair")
    assert [one.name for one in found.ran] == ["fcfs", "vtc_fair"]
    assert "seed 42: " in named(found, "tests.simulator.faulty_queues:Exits").error


def test_all_shipped_policies_run_unasked_and_impossible_ones_are_left_out() -> None:
    found = compare(overrides=[], seeds=1)
    assert [one.name for one in found.ran] == list(QUEUES)
    found = compare(seeds=1)
    assert "policies fcfs_tail and lpm are SGLang's" in named(found, "lpm").error
    with pytest.raises(SettingsError, match=r"^lpm: "):
        compare("fcfs", "lpm")


def test_recorded_requests_without_draws_have_one_seed() -> None:
    assert len(compare("fcfs", "req_queue", workload={"workload": "azure", "num_requests": 20}, seeds=4).seeds) == 1
    drawn = {"workload": "azure", "num_requests": 20, "adapters": "all"}
    assert len(compare("fcfs", "req_queue", workload=drawn, seeds=2).seeds) == 2


def test_tenants_are_the_requests_own_or_their_adapters() -> None:
    requests = lorrery.Requests([0.0, 0.1, 0.2], [8, 8, 8], [4, 4, 4], tenant_id=["a", "b", "a"])
    found = lorrery.compare(candidates=["fcfs", "vtc_fair"], workload=requests, seeds=1, workers=1)
    assert found.tenants == ["a", "b"]
    assert all(name.startswith(("lora-", "tloen/")) for name in compare("fcfs", "req_queue").tenants)


def test_overrides_are_a_mapping_or_texts_and_need_not_fit_the_default_policy() -> None:
    work = {"rate": 4, "duration": 2}
    one = lorrery.compare(
        candidates=["lpm,memory=estimated", "fcfs_tail"],
        overrides={"scheduler.batching": "sglang", "adapters.registry": [{"id": "a", "rank": 8}]},
        workload=work,
        seeds=1,
    )
    assert [contestant.error for contestant in one.contestants] == ["", ""]
    assert {contestant.parts["batching"] for contestant in one.contestants} == {"sglang"}
