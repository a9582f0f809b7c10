"""Which settings of a scheduler exclude each other, and why; all others combine."""

from collections.abc import Mapping

from lorrery.scheduler.core.batching.table import way_of
from lorrery.scheduler.core.memory.table import MEMORIES
from lorrery.scheduler.core.policies import QUEUES, batching_of, limits_of, policy_of
from lorrery.scheduler.core.replica_settings import LIMITS, SET, is_among


def why_excluded(chosen: Mapping[str, object]) -> str | None:
    """Return why these settings exclude each other, or None if they do not.

    Args:
        chosen: every setting that a row names; `batching` may be None if the policy decides it.
    """
    policy, batching = str(chosen["policy"]), chosen["batching"]
    chosen = {**chosen, "batching": batching_of(policy, None if batching is None else str(batching))}
    row = policy_of(policy)
    for other in QUEUES.values():
        for name, why in other.own_settings.items():
            if name not in row.own_settings and is_among(chosen[name], {SET}):
                return why
    way = way_of(str(chosen["batching"]))
    for exclusion in (*row.excludes, *way.excludes, *MEMORIES[str(chosen["memory"])].excludes):
        if exclusion.applies(chosen):
            return exclusion.why
    return None


def why_too_few_tokens(
    policy: str, batching: str | None, family: str | None, max_req_total_len: int, limits: Mapping[str, object]
) -> str | None:
    """Return why a configured prompt limit that this choice uses is too low; None if it is not.

    Args:
        policy: its name; all arguments are values of the settings.
        batching: way to batch.
        family: limits family.
        max_req_total_len: longest prompt plus output, in tokens.
        limits: the prompt limits of all families by setting; None: not set, and derived.
    """
    if not way_of(batching_of(policy, batching)).prompt_bound:
        return None
    name = LIMITS[limits_of(policy, family)].prompt_limit
    most = limits[name]
    if not isinstance(most, int) or most >= max_req_total_len:
        return None
    return (
        f"{name} ({most}) must be at least max_req_total_len ({max_req_total_len}): a resumed or preempted sequence is"
        " prefilled in one step, unless batching = 'chunked'"
    )
