"""Which settings of a scheduler make no sense together, and why. Queues and ways to batch combine freely otherwise.

One table. A rule applies where every setting that it names has one of the values given; `None` among them is "unset",
`SET` is "anything but unset or empty".
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

SET = "(set)"

SLORA_POLICIES = frozenset({"req_queue", "vtc_fair", "abort", "cluster", "peft", "pets"})
"""Queues of S-LoRA, which come with its limits and its loop; `fcfs` comes with vLLM's and `continuous`."""


@dataclass(frozen=True, slots=True)
class Senseless:
    """Some settings that do not go together.

    Attributes:
        settings: setting to the values that are meant.
        why: the reason, and what to do.
    """

    settings: Mapping[str, Collection[object]]
    why: str


SENSELESS = (
    Senseless(
        {"policy": {"fcfs"}, "strict": {True}},
        "strict keeps an original's quirks; fcfs has no original",
    ),
    Senseless(
        {"memory": {"paged", "none"}, "strict": {True}},
        "strict keeps an original's quirks; all of S-LoRA's queues have memory = 'peak'",
    ),
    Senseless(
        {"memory": {"paged"}, "batching": {"static"}},
        "memory = 'paged' preempts when blocks run out; nobody leaves a batch of batching = 'static' before its end, so"
        " give it memory = 'peak'",
    ),
    Senseless(
        {"policy": {"pets"}, "batching": {"chunked"}},
        "pets chooses prompts by the cost of computing them whole and together; batching = 'chunked' computes them in"
        " pieces",
    ),
    Senseless(
        {"policy": SLORA_POLICIES, "batching": {"llm_mock"}},
        "batching = 'llm_mock' is that engine's whole loop, which takes requests in order of arrival: give it policy ="
        " 'fcfs', or take batching = 'mixed'",
    ),
    Senseless(
        {"prefetch": {True}, "batching": {"continuous", "mixed", "chunked", "static", "llm_mock"}},
        "prefetch uses the steps that batching = 'slora_loop' waits before it tries a new batch; other ways to batch do"
        " not wait",
    ),
    Senseless(
        {"prefetch": {True}, "policy": {"abort"}},
        "whom abort takes next, the newest or the oldest, is only known when it forms the batch",
    ),
    Senseless(
        {"prefetch": {True}, "policy": {"peft"}},
        "peft changes its adapter only when nothing runs, and prefetch loads beside a running batch",
    ),
    Senseless(
        {"prefetch": {True}, "policy": {"pets"}},
        "whom pets takes next is only known when it forms the batch",
    ),
    Senseless(
        {"prefetch": {True}, "policy": {"vtc_fair"}, "strict": {True}},
        "S-LoRA's vtc_fair has no look-ahead; leave strict or prefetch",
    ),
    Senseless(
        {"policy": {"cluster"}, "batch_num_adapters": {None}},
        "cluster needs batch_num_adapters, the number of adapters that a batch may have",
    ),
    Senseless(
        {"policy": {"req_queue", "fcfs", "vtc_fair", "abort", "peft", "pets"}, "batch_num_adapters": {SET}},
        "batch_num_adapters is for policy = 'cluster'",
    ),
    Senseless(
        {"policy": {"req_queue", "fcfs", "abort", "cluster", "peft", "pets"}, "fair_weights": {SET}},
        "fair_weights are for policy = 'vtc_fair'",
    ),
)


def why_senseless(settings: Mapping[str, object]) -> str | None:
    """Return why these settings do not go together, or None if they do.

    Args:
        settings: every setting that the table names; `batching` spelt out where the policy decides.
    """
    for rule in SENSELESS:
        if all(_means(values, settings[name]) for name, values in rule.settings.items()):
            return rule.why
    return None


def batching_of(policy: str) -> str:
    """Return the way to batch that a policy's original has."""
    return "slora_loop" if policy in SLORA_POLICIES else "continuous"


def _means(values: Collection[object], value: object) -> bool:
    if SET in values and value is not None and value != () and value != {}:
        return True
    return any(value == one for one in values)
