"""Settings of a scheduler that make no sense together are refused, with the reason; all others combine."""

import itertools
from fractions import Fraction
from typing import get_args

import pytest

from lorrery.chassis import settings
from lorrery.chassis.combinations import SENSELESS, why_senseless
from lorrery.chassis.errors import SettingsError
from lorrery.chassis.settings import SchedulerSettings, load
from lorrery.scheduler.core.catalogue import BATCHINGS, MEMORIES, PLACEMENTS, QUEUES, ReplicaSettings

ADAPTERS = ('adapters.registry=[{id="a", rank=8, count=2}]',)


def choices(name: str) -> set[str]:
    annotation = SchedulerSettings.model_fields[name].annotation
    values = {value for part in (annotation, *get_args(annotation)) for value in get_args(part)}
    return {value for value in values if isinstance(value, str)}


def test_the_settings_and_the_core_know_the_same_names() -> None:
    assert set(settings.POLICIES) == set(QUEUES)
    assert set(settings.BATCHINGS) == set(BATCHINGS)
    assert set(settings.PLACEMENTS) == set(PLACEMENTS)
    assert choices("memory") == set(MEMORIES)


def test_the_settings_and_the_core_agree_on_the_default_way_to_batch() -> None:
    for policy in QUEUES:
        core = ReplicaSettings(policy, max_total_token_num=1, max_req_total_len=1).batching_name
        own = {"batch_num_adapters": 2} if policy == "cluster" else {}
        other = SchedulerSettings.model_validate({"policy": policy} | own)
        spelt_out = SchedulerSettings.model_validate({"policy": policy, "batching": core} | own)
        assert other.batching is None
        assert spelt_out.batching == core
        # prefetch goes with slora_loop only, so it tells which one is meant
        if policy in ("req_queue", "fcfs"):
            assert refused(f"scheduler.policy={policy}", "scheduler.prefetch=true") is (core != "slora_loop")


def refused(*overrides: str) -> bool:
    try:
        load(overrides=(*ADAPTERS, *overrides))
    except SettingsError:
        return True
    return False


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("policy=pets", "batching=chunked"), "computes them in pieces"),
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
        (("policy=vtc_fair", "fair_weights=[0]"), "greater than 0"),
        (("policy=abort", "first_token_slo_seconds=0.5"), "greater than 0.5"),
        (("policy=fcfs", "strict=true"), "no original"),
        (("memory=paged", "strict=true"), "memory = 'peak'"),
        (("memory=none", "strict=true"), "memory = 'peak'"),
        (("memory=paged", "batching=static"), "before its end"),
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
        )
    }
    assert senseless == {("pets", "chunked")} | {(policy, "llm_mock") for policy in set(QUEUES) - {"fcfs"}}


def test_every_rule_can_apply() -> None:
    for rule in SENSELESS:
        names = {name for other in SENSELESS for name in other.settings}
        values = {name: next(iter(meant)) for name, meant in rule.settings.items()}
        assert why_senseless(dict.fromkeys(names) | values) is not None


@pytest.mark.parametrize("weights", ["[0.1, 3]", "{a-1 = 3, a-0 = 0.1}"])
def test_weights_go_to_adapters_by_order_or_by_name(weights: str) -> None:
    settings = load(overrides=(*ADAPTERS, "scheduler.policy=vtc_fair", f"scheduler.fair_weights={weights}"))
    assert settings.fair_weights() == {"a-0": Fraction(1, 10), "a-1": Fraction(3)}
