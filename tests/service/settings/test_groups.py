"""Groups of `[[workers]]`: each is judged by what it says itself, whichever of them a process is of."""

from pathlib import Path
from typing import Any

import pytest

from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import changed, load, origins

LOSSES = ["worker_loss,at=5,worker=worker-1", "worker_loss,at=20,worker=worker-1"]
RULE = {"enabled": True}


@pytest.mark.parametrize(
    "content",
    [
        {"autoscaler": RULE, "workers": [{"autoscaler": {"max_replicas": 2}}, {"autoscaler": {"min_replicas": 3}}]},
        {
            "autoscaler": RULE,
            "workers": [
                {"autoscaler": {"metric": "num_requests_running"}},
                {"autoscaler": {"metrics": {"num_requests_running": 8}}},
            ],
        },
        {"autoscaler": RULE, "workers": [{"autoscaler": {"enabled": False}}, {"gpu": "L4"}], "faults": LOSSES},
        {"workers": [{"gpu": "L4", "gpus": 8}, {"count": 50_000}]},
        {"workers": [{"step_time": "table", "profile": "a.csv"}, {"step_time": "roofline", "tensor_parallel": 2}]},
    ],
    ids=["bounds", "metrics", "losses", "numbers", "devices"],
)
def test_what_a_group_says_itself_is_nothing_to_the_others(content: dict[str, Any]):
    whole = changed(content)
    for number, group in enumerate(whole.workers):
        own = changed(content, {"workers": [], **{f"worker.{key}": one for key, one in group.overrides.items()}})
        found = whole.for_group(number)
        assert found.worker.model_copy(update={"group": None}) == own.worker
        for key, value in group.autoscaler.items():
            assert getattr(found.autoscaler, key) == value
        assert found.is_autoscaled == whole.is_autoscaled


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [{}, {"autoscaler": {"min_replicas": 0}}],
            "workers.1.autoscaler.min_replicas is 0; with 2 groups it must be at least 1, .*: set it to 1",
        ),
        ([{}, {"autoscaler": {"min_replicas": 9}}], "workers.1.autoscaler: min_replicas is 9, max_replicas 8"),
        (
            [{"autoscaler": {"ttft_seconds": 9}}],
            r"workers.0.autoscaler.ttft_seconds: .* all workers; set it in \[autoscaler\]",
        ),
        ([{"autoscaler": {"tpot_seconds": 9}}, {}], "workers.0.autoscaler.tpot_seconds: "),
    ],
)
def test_a_rule_that_a_group_cannot_have_is_refused_with_its_cure(groups: list[dict[str, Any]], message: str):
    with pytest.raises(SettingsError, match=message):
        changed({"autoscaler": RULE, "workers": groups})


@pytest.mark.parametrize(
    ("group", "key", "meant"),
    [
        ({"cout": 3}, "cout", "count"),
        ({"gpuu": "L4"}, "gpuu", "gpu"),
        ({"tensor_paralel": 2}, "tensor_paralel", "tensor_parallel"),
        ({"constant": {"prefill_m": 1}}, "constant.prefill_m", "constant.prefill_ms"),
        ({"autoscaler": {"targt": 9}}, "autoscaler.targt", "autoscaler.target"),
        ({"targets": 9}, "targets", None),
        ({"drain_second": 9}, "drain_second", None),  # it is of the process, and no group may set it
    ],
)
def test_a_key_that_no_group_has_is_told_with_the_nearest_that_one_may_have(
    group: dict[str, Any], key: str, meant: str | None
):
    with pytest.raises(SettingsError) as caught:
        changed({"workers": [{}, group]})
    cure = "" if meant is None else f"; did you mean workers.1.{meant}?"
    assert f"workers.1.{key}: no such setting{cure}" in str(caught.value)
    assert ("did you mean" in str(caught.value)) == (meant is not None)


def test_a_group_that_is_alone_may_go_to_zero_and_one_that_stays_has_no_bounds_to_keep():
    changed({"autoscaler": RULE | {"min_replicas": 0}, "workers": [{"gpu": "L4"}]})
    changed({"autoscaler": {"min_replicas": 0}, "workers": [{}, {"gpu": "L4"}]})


FILE = """
[autoscaler]
target = 9
[[workers]]
gpu = "L4"
autoscaler = {enabled = true, target = 2, metrics = {kv_cache_usage_perc = 1}}
[[workers]]
autoscaler = {enabled = false, target = 3, metrics = {num_requests_running = 8}}
"""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "autoscaler.target=1000",
            "autoscaler.target is 1000, and no worker has it: every group .* sets target itself",
        ),
        ("autoscaler.target=3", "autoscaler.target is 3, and that changes nothing: every group .* sets target itself"),
        ("autoscaler.metrics={prompt_tokens_per_second = 1}", "autoscaler.metrics is .*, and no worker has it"),
        ("autoscaler.metrics={}", "autoscaler.metrics is {}, and no worker has it"),
    ],
)
def test_a_value_that_changes_no_group_is_refused(tmp_path: Path, override: str, message: str):
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    with pytest.raises(SettingsError, match=message):
        load(path, [override])


@pytest.mark.parametrize("override", ["autoscaler.enabled=true", "autoscaler.max_replicas=3", "worker.gpu='H200-SXM'"])
def test_a_value_that_some_group_has_by_it_is_not(tmp_path: Path, override: str):
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)  # whose second group sets no GPU; --autoscale is for files in which some group stays, too
    load(path, [override])


def test_a_value_of_a_group_comes_from_the_group(tmp_path: Path):
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    found = origins(path, ["worker.group=0"])
    assert found["worker", "gpu"] == found["autoscaler", "target"] == "workers.0"
    assert load(path, ["worker.group=0"]).autoscaler.target == 2
