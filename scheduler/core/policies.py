"""Table of policies by the names that settings use: one row each, with all that other code needs to know of a policy.

A row has the queue's builder, the family of limits that it runs under, its default way to batch, what it cannot be
combined with, and why. To add a policy, write its file and add its row here; the ways to batch, memory rules, prefix
caches and placements have tables too (`batching/table.py`, `memory/table.py`, `placements/table.py`). A test holds
settings, docs, fuzz corpus and benchmarks to the tables.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.protocols import Queue
from lorrery.scheduler.core.queues.early_drop import EarlyDrop
from lorrery.scheduler.core.queues.few_adapters import Cluster, Peft
from lorrery.scheduler.core.queues.fifo import Fifo, Priority
from lorrery.scheduler.core.queues.pets import MeasuredProfile, Pets, Profile
from lorrery.scheduler.core.queues.sglang import LongestPrefix, Rejoining
from lorrery.scheduler.core.queues.vtc_fair import VtcFair
from lorrery.scheduler.core.replica_settings import (
    LIMITS,
    SET,
    Exclusion,
    LimitsFamily,
    NotIn,
    ReplicaSettings,
)


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy: its queue, and what belongs to it.

    Attributes:
        build: makes the queue; None: the policy comes from outside the tree.
        limits: key of `LIMITS`.
        batching: key of `BATCHINGS`; the way to batch if the settings name none.
        excludes: combinations with other settings that are refused.
        own_settings: settings read only by policies that list them, with the reason given where another has them set.
        needs_profile: whether it needs the device's cost profile.
        keeps_refused: whether in strict mode a refused candidate stays counted for the rest of a pass.
        looks_ahead: whether adapters of the first waiting sequences are loaded ahead: their order is known before the
            batch is formed, and does not change with time.
    """

    build: Callable[[ReplicaSettings], Queue] | None
    limits: str
    batching: str
    excludes: tuple[Exclusion, ...] = ()
    own_settings: Mapping[str, str] = field(default_factory=dict)
    needs_profile: bool = False
    keeps_refused: bool = False
    looks_ahead: bool = False


_LLM_MOCK_IS_IN_ORDER = Exclusion(
    {"batching": {"llm_mock"}},
    "batching = 'llm_mock' is that engine's whole loop, which takes requests in order of arrival: give it policy ="
    " 'fcfs', or take batching = 'mixed'",
)

_IS_OF_SGLANG = (
    Exclusion(
        {"batching": NotIn(frozenset({"sglang"}))},
        "policies fcfs_tail and lpm are SGLang's, whose pass they need: give them batching = 'sglang', or take policy ="
        " 'fcfs'",
    ),
    Exclusion({"strict": {True}}, "strict keeps S-LoRA's quirks; SGLang's policies have none of them"),
)


def _profile(settings: ReplicaSettings) -> Profile:
    profile = settings.profile
    if profile is None:
        raise ValueError("the policy pets needs a profile of the device")
    if not settings.strict:
        return profile
    return MeasuredProfile(lambda num, tokens, rank: profile.prefill(num, tokens) + profile.adapter(rank, num, tokens))


NO_BOUND = frozenset({"vllm", "prefill_first"})
"""Engines' ways to batch in which any number of sequences may overtake one that waits for its adapter."""

QUEUES: dict[str, Policy] = {
    "req_queue": Policy(
        lambda s: Fifo(strict=s.strict), "slora", "slora_loop", (_LLM_MOCK_IS_IN_ORDER,), looks_ahead=True
    ),
    "fcfs": Policy(
        lambda s: Fifo(by_adapter=batching_name(s) in NO_BOUND and s.max_overtakes is None and s.max_loras is not None),
        "vllm",
        "continuous",
        (Exclusion({"strict": {True}}, "strict keeps an original's quirks; fcfs has no original"),),
        looks_ahead=True,
    ),
    "priority": Policy(
        lambda s: Priority(),
        "vllm",
        "continuous",
        (
            _LLM_MOCK_IS_IN_ORDER,
            Exclusion({"strict": {True}}, "strict keeps an original's quirks; priority has no original"),
            Exclusion({"prefetch": {True}}, "prefetch is for S-LoRA's policies"),
        ),
        looks_ahead=True,
    ),
    "fcfs_tail": Policy(lambda s: Rejoining(), "vllm", "sglang", _IS_OF_SGLANG),
    "lpm": Policy(lambda s: LongestPrefix(), "vllm", "sglang", _IS_OF_SGLANG),
    "vtc_fair": Policy(
        lambda s: VtcFair(
            s.fair_weights, strict=s.strict, by_tenant=s.fair_by == "tenant", max_running=s.fair_max_running
        ),
        "slora",
        "slora_loop",
        (
            _LLM_MOCK_IS_IN_ORDER,
            Exclusion(
                {"prefetch": {True}, "strict": {True}},
                "S-LoRA's vtc_fair has no look-ahead; leave strict or prefetch",
            ),
            Exclusion(
                {"fair_by": {"tenant"}, "strict": {True}},
                "S-LoRA's vtc_fair is fair between adapters; leave strict or fair_by",
            ),
            Exclusion(
                {"fair_max_running": {SET}, "strict": {True}},
                "S-LoRA's vtc_fair lets any number of one adapter's run; leave strict or fair_max_running",
            ),
        ),
        own_settings={
            "fair_weights": "fair_weights are for policy = 'vtc_fair'",
            "fair_by": "fair_by is for policy = 'vtc_fair'",
            "fair_max_running": "fair_max_running is for policy = 'vtc_fair'",
        },
        looks_ahead=True,
    ),
    "abort": Policy(
        lambda s: EarlyDrop(s.first_token_slo_ps, strict=s.strict),
        "slora",
        "slora_loop",
        (
            _LLM_MOCK_IS_IN_ORDER,
            Exclusion(
                {"prefetch": {True}},
                "whom abort takes next, the newest or the oldest, is only known when it forms the batch",
            ),
        ),
    ),
    "cluster": Policy(
        lambda s: Cluster(s.batch_num_adapters, strict=s.strict),
        "slora",
        "slora_loop",
        (
            _LLM_MOCK_IS_IN_ORDER,
            Exclusion(
                {"batch_num_adapters": {None}},
                "cluster needs batch_num_adapters, the number of adapters that a batch may have",
            ),
        ),
        own_settings={"batch_num_adapters": "batch_num_adapters is for policy = 'cluster'"},
        keeps_refused=True,
        looks_ahead=True,
    ),
    "peft": Policy(
        lambda s: Peft(strict=s.strict),
        "slora",
        "slora_loop",
        (
            _LLM_MOCK_IS_IN_ORDER,
            Exclusion(
                {"prefetch": {True}},
                "peft changes its adapter only when nothing runs, and prefetch loads beside a running batch",
            ),
        ),
    ),
    "pets": Policy(
        lambda s: Pets(_profile(s), strict=s.strict),
        "slora",
        "slora_loop",
        (
            _LLM_MOCK_IS_IN_ORDER,
            Exclusion(
                {"batching": {"chunked", "prefill_first", "vllm"}},
                "pets chooses prompts by the cost of computing them whole and together; batching = 'chunked',"
                " 'prefill_first' and 'vllm' compute them in pieces",
            ),
            Exclusion({"prefetch": {True}}, "whom pets takes next is only known when it forms the batch"),
        ),
        needs_profile=True,
    ),
}

PLUG_IN = Policy(None, "vllm", "continuous")
"""The row of every policy from outside the tree (`module:Class`): it runs as `fcfs` does unless settings differ."""


def policy_of(name: str) -> Policy:
    """Return a policy's row; a name that is not in the table is a plug-in."""
    return QUEUES.get(name, PLUG_IN)


def batching_of(policy: str, chosen: str | None = None) -> str:
    """Return the chosen way to batch, or the policy's default."""
    return policy_of(policy).batching if chosen is None else chosen


def limits_of(policy: str, chosen: str | None = None) -> str:
    """Return the chosen family of limits, or the policy's default."""
    return policy_of(policy).limits if chosen is None else chosen


def batching_name(settings: ReplicaSettings) -> str:
    """Return a replica's way to batch."""
    return batching_of(settings.policy, settings.batching)


def limits_family(settings: ReplicaSettings) -> LimitsFamily:
    """Return the limits family of a replica."""
    return LIMITS[limits_of(settings.policy, settings.limits)]


def batch_limits(settings: ReplicaSettings) -> BatchLimits:
    """Return the limits of an admission pass into an empty batch that computes whole prompts."""
    return limits_family(settings).of(settings)
