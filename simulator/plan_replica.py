"""What a plan's arithmetic takes from a replica's settings: how prompts share its steps, and what it holds."""

from collections.abc import Callable

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.slora_loop import MAX_WAIT_STEPS
from lorrery.scheduler.core.policies import batch_limits, batching_name, limits_of
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.settings import Settings
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.capacity import Room
from lorrery.worker.device.closed_loop import PromptTurns, Turns

__all__ = ["TURNS", "limit_name", "replica_of", "room_of", "turns_of"]

Row = Callable[[ReplicaSettings, BatchLimits], PromptTurns]

TURNS: dict[str, Row] = {
    "slora_loop": lambda s, limits: PromptTurns(Turns.SPACED, limits.max_prompt_tokens, decode_steps=MAX_WAIT_STEPS),
    "continuous": lambda s, limits: PromptTurns(Turns.FIRST, limits.max_prompt_tokens),
    "mixed": lambda s, limits: PromptTurns(Turns.BESIDE, limits.max_prompt_tokens),
    "chunked": lambda s, limits: PromptTurns(Turns.BESIDE, s.step_tokens, in_pieces=True),
    "prefill_first": lambda s, limits: PromptTurns(Turns.FIRST, s.step_tokens, in_pieces=True),
    "static": lambda s, limits: PromptTurns(Turns.ROUNDS, limits.max_prompt_tokens),
    "llm_mock": lambda s, limits: PromptTurns(Turns.BESIDE, NEVER),
}
"""Ways to batch, as `scheduler.core.batchings` names them; one from outside the tree is taken for `continuous`."""

_PAGED = {"paged", "no_evict"}


def replica_of(settings: Settings, kv_pool_tokens: int) -> ReplicaSettings:
    """Return what bounds the batches of a replica with such a pool."""
    own = settings.scheduler
    return ReplicaSettings(
        policy=own.policy,
        max_total_token_num=kv_pool_tokens,
        max_req_total_len=own.max_req_total_len,
        batching=own.batching,
        memory=own.memory,
        block_size=own.block_size,
        limits=own.limits,
        running_max_req_size=own.running_max_req_size,
        batch_max_tokens=own.batch_max_tokens,
        max_num_seqs=own.max_num_seqs,
        max_num_batched_tokens=own.max_num_batched_tokens,
    )


def turns_of(replica: ReplicaSettings) -> PromptTurns:
    """Return how its prompts and decodes share steps."""
    return TURNS.get(batching_name(replica), TURNS["continuous"])(replica, batch_limits(replica))


def room_of(replica: ReplicaSettings) -> Room:
    """Return what it holds."""
    return Room(
        replica.max_total_token_num,
        replica.block_size if replica.memory in _PAGED else None,
        batch_limits(replica).max_sequences,
    )


def limit_name(settings: Settings) -> str:
    """Return the setting that says how many sequences run on a replica at once."""
    own = settings.scheduler
    return {"slora": "running_max_req_size", "vllm": "max_num_seqs"}[limits_of(own.policy, own.limits)]
