"""The tables of policies: settings, docs, fuzz corpus and benchmarks know what is in them, and what excludes what."""

import itertools
import re
from collections.abc import Collection
from fractions import Fraction
from pathlib import Path

import pytest

from lorrery.scheduler.core.build import why_excluded
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.policies import BATCHINGS, MEMORIES, PREFIX_CACHES, QUEUES
from lorrery.scheduler.core.queues.base import ListedQueue, is_asked_every_step
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.replica_settings import LIMITS, Exclusion, NotIn, ReplicaSettings
from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import load
from tests.scheduler.core.test_replica import POLICIES, LinearProfile
from tests.simulator.fuzz_cases import draw_case

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "deploy" / "cluster.toml"
ADAPTERS = ('adapters.registry=[{id="a", rank=8, count=2}]',)
TABLES = {
    "policy": (QUEUES, "Queues"),
    "batching": (BATCHINGS, "Ways to batch"),
    "memory": (MEMORIES, "Memory"),
    "prefix_cache.kind": (PREFIX_CACHES, "Prefix caches"),
    "placement": (PLACEMENTS, "Placement"),
}


@pytest.mark.parametrize("key", TABLES)
def test_the_settings_take_every_row_and_name_them_all_where_they_take_none(key: str) -> None:
    for name in TABLES[key][0]:
        more = {
            "cluster": ["scheduler.batch_num_adapters=2"],
            "llm_mock": ["scheduler.policy=fcfs"],
            "static_trie": ["scheduler.prefix_cache.trie=t"],
            "fcfs_tail": ["scheduler.memory=estimated"],
            "lpm": ["scheduler.memory=estimated"],
            "sglang": ["scheduler.policy=lpm", "scheduler.memory=estimated"],
            "estimated": ["scheduler.policy=lpm"],
            "vllm": ["scheduler.memory=on_demand"],
            "on_demand": ["scheduler.batching=vllm"],
        }
        assert load(overrides=[f"scheduler.{key}={name}", *more.get(name, [])])
    with pytest.raises(SettingsError, match=re.escape(f"'lifo' is none of {', '.join(TABLES[key][0])}")):
        load(overrides=[f"scheduler.{key}=lifo"])


@pytest.mark.parametrize("key", TABLES)
def test_the_page_of_policies_has_a_row_for_each_of_the_table(key: str) -> None:
    table, heading = TABLES[key]
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    missing = [name for name in table if f"`{name}`" not in section and name != "none"]
    assert not missing, f"docs/policies.md, {heading}"
    listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    if key != "prefix_cache.kind":  # which has no table of names
        assert set(listed) - {"none"} == set(table) - {"none"}


def test_contract_and_fuzz_corpus_know_every_policy() -> None:
    assert {policy.split()[1] for policy in POLICIES} == set(BATCHINGS)
    rows = [draw_case(number).replica.policy for number in range(2 * len(QUEUES))]
    assert set(rows) == set(QUEUES)


def test_every_row_names_limits_and_a_way_to_batch_that_there_are() -> None:
    for row in QUEUES.values():
        assert row.limits in LIMITS
        assert row.batching in BATCHINGS


def test_no_policy_of_ours_has_to_be_asked_at_every_step() -> None:
    for name, row in QUEUES.items():
        assert row.build is not None
        assert not is_asked_every_step(row.build(ReplicaSettings(name, 100, 50, profile=LinearProfile())))


class Unsaid(ListedQueue):
    def admit(self, admission, running, at_ps):
        return []


class ChangedFifo(Fifo):
    def admit(self, admission, running, at_ps):
        return super().admit(admission, running, at_ps)


class NamedFifo(Fifo):
    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name


@pytest.mark.parametrize(("queue", "asked"), [(Unsaid, True), (ChangedFifo, True), (NamedFifo, False)])
def test_how_long_an_answer_holds_is_known_of_the_class_that_says_so_only(queue: type, asked: bool) -> None:
    assert is_asked_every_step(queue()) is asked


def refused(*overrides: str) -> bool:
    try:
        load(overrides=(*ADAPTERS, *overrides))
    except SettingsError:
        return True
    return False


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("policy=pets", "batching=chunked"), "compute them in pieces"),
        (("policy=vtc_fair", "batching=llm_mock"), "in order of arrival"),
        (("policy=fcfs", "prefetch=true"), "other ways to batch do not wait"),
        (("policy=abort", "prefetch=true"), "newest or the oldest"),
        (("policy=peft", "prefetch=true"), "only when nothing runs"),
        (("policy=pets", "prefetch=true"), "when it forms the batch"),
        (("policy=vtc_fair", "strict=true", "prefetch=true"), "no look-ahead"),
        (("policy=cluster",), "needs batch_num_adapters"),
        (("batch_num_adapters=2",), "is for policy = 'cluster'"),
        (("fair_weights=[1, 2]",), "are for policy = 'vtc_fair'"),
        (("policy=vtc_fair", "fair_weights=[1, 2, 3]"), "has 3 weights; the registry has 2 adapters"),
        (("fair_by=tenant",), "fair_by is for policy = 'vtc_fair'"),
        (("policy=vtc_fair", "fair_max_running=2", "strict=true"), "any number of one adapter's"),
        (("policy=vtc_fair", "fair_by=tenant", "strict=true"), "fair between adapters"),
        (("policy=vtc_fair", "fair_by=tenant", "fair_weights=[1, 2]"), "weights are given by tenant"),
        (("policy=vtc_fair", "fair_weights=[0]"), r"fair_weights\.0: .* equal to 0.000001, got 0"),
        (("policy=vtc_fair", "fair_weights={a=0}"), r"fair_weights\.a: .* equal to 0.000001, got 0"),
        (("policy=abort", "first_token_slo_seconds=0.5"), "greater than 0.5"),
        (("policy=fcfs", "strict=true"), "no original"),
        (("memory=paged", "strict=true"), "memory = 'peak'"),
        (("memory=none", "strict=true"), "memory = 'peak'"),
        (("memory=paged", "batching=static"), "before its end"),
        (("policy=lpm", "batching=chunked"), "whose pass they need"),
        (("policy=fcfs", "batching=sglang", "memory=estimated"), "that engine's whole loop"),
        (("policy=lpm",), "what running requests are thought to need"),
        (("policy=fcfs", "memory=estimated"), "the way to batch that retracts"),
        (("policy=lpm", "memory=estimated", "prefix_cache={kind='blocks'}"), "that engine's prefix cache"),
    ],
)
def test_a_senseless_pair_is_refused_with_the_reason(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        load(overrides=(*ADAPTERS, *(f"scheduler.{override}" for override in overrides)))


def test_every_queue_goes_with_every_way_to_batch_but_those_in_the_table() -> None:
    senseless = {
        (policy, batching)
        for policy, batching in itertools.product(QUEUES, BATCHINGS)
        if refused(
            f"scheduler.policy={policy}",
            f"scheduler.batching={batching}",
            *(["scheduler.batch_num_adapters=2"] if policy == "cluster" else []),
            *(["scheduler.memory=estimated"] if batching == "sglang" else []),
            *(["scheduler.memory=on_demand"] if batching == "vllm" else []),
        )
    }
    of_sglang = {"fcfs_tail", "lpm"}
    expected = {("pets", "chunked"), ("pets", "prefill_first"), ("pets", "vllm")}
    expected |= {(policy, "llm_mock") for policy in set(QUEUES) - {"fcfs"}}
    expected |= {(policy, batching) for policy in of_sglang for batching in set(BATCHINGS) - {"sglang"}}
    expected |= {(policy, "sglang") for policy in set(QUEUES) - of_sglang}
    assert senseless == expected


def exclusions() -> list[tuple[dict[str, object], Exclusion]]:
    found = [({"policy": name}, one) for name, row in QUEUES.items() for one in row.excludes]
    found += [({"batching": name}, one) for name, way in BATCHINGS.items() for one in way.excludes]
    return found + [({"memory": name}, one) for name, rule in MEMORIES.items() for one in rule.excludes]


def excluded_value(name: str, values: Collection[object] | NotIn) -> object:
    if not isinstance(values, NotIn):
        return next(iter(values))
    return {"policy": "fcfs", "batching": "continuous", "memory": "peak", "prefix_cache_kind": "blocks"}[name]


def test_every_exclusion_can_apply() -> None:
    for row, exclusion in exclusions():
        settings = {"policy": "req_queue", "batching": None, "memory": "peak", "strict": False, "prefetch": False}
        settings |= {name: None for policy in QUEUES.values() for name in policy.own_settings}
        settings |= {name: excluded_value(name, values) for name, values in exclusion.settings.items()} | row
        assert why_excluded(settings) is not None


# --- limits: what is not used refuses nothing, and what is not set is derived -----------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        ("policy=fcfs", "batch_max_tokens=16"),
        ("policy=req_queue", "max_num_batched_tokens=16"),
        ("policy=req_queue", "batching=chunked", "batch_max_tokens=16"),
        ("policy=fcfs", "batching=chunked", "max_num_batched_tokens=16"),
        ("policy=fcfs", "batching=llm_mock", "max_num_batched_tokens=16"),
        ("policy=fcfs", "limits=slora", "max_num_batched_tokens=16"),
        ("policy=my_module:MyQueue", "batch_max_tokens=16"),
        ("policy=my_module:MyQueue", "batching=slora_loop", "prefetch=true"),
    ],
)
def test_a_limit_that_the_choice_does_not_use_refuses_nothing(overrides: tuple[str, ...]) -> None:
    assert load(overrides=[f"scheduler.{override}" for override in overrides])


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ("policy=fcfs", "max_num_batched_tokens=16"),
            "max_num_batched_tokens (16) must be at least max_req_total_len",
        ),
        (("policy=my_module:MyQueue", "max_num_batched_tokens=16"), "max_num_batched_tokens (16) must be at least"),
        (("batch_max_tokens=16",), "batch_max_tokens (16) must be at least max_req_total_len (3072)"),
        (("policy=my_module:MyQueue", "limits=slora", "batch_max_tokens=16"), "batch_max_tokens (16) must be at least"),
        (("policy=my_module:MyQueue", "prefetch=true"), "other ways to batch do not wait"),
    ],
)
def test_a_limit_that_is_set_and_used_and_too_low_is_refused(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(reason)):
        load(overrides=[f"scheduler.{override}" for override in overrides])


@pytest.mark.parametrize("weights", ["[0.1, 3]", "{a-1 = 3, a-0 = 0.1}"])
def test_weights_go_to_adapters_by_order_or_by_name(weights: str) -> None:
    settings = load(overrides=(*ADAPTERS, "scheduler.policy=vtc_fair", f"scheduler.fair_weights={weights}"))
    assert settings.fair_weights() == {"a-0": Fraction(1, 10), "a-1": Fraction(3)}
