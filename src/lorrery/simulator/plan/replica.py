"""Inputs of a plan's arithmetic from a replica's settings: how prompts share its steps, and how much it holds."""

from collections.abc import Callable

from lorrery.scheduler.core.adapters.loads import AdapterCosts, Tier
from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.slora_loop import MAX_WAIT_STEPS
from lorrery.scheduler.core.policies import batch_limits, batching_name
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter
from lorrery.service.settings.cluster import Settings
from lorrery.vocabulary.units import NEVER, PS_PER_SECOND
from lorrery.worker.device.architecture import Model
from lorrery.worker.device.capacity import Loads, Room, Workload
from lorrery.worker.device.closed_loop import PromptTurns, Turns

__all__ = ["TURNS", "adapter_costs", "adapter_loads", "room_of", "turns_of"]

Row = Callable[[ReplicaSettings, BatchLimits], PromptTurns]

TURNS: dict[str, Row] = {
    "slora_loop": lambda s, limits: PromptTurns(Turns.SPACED, limits.max_prompt_tokens, decode_steps=MAX_WAIT_STEPS),
    "continuous": lambda s, limits: PromptTurns(Turns.FIRST, limits.max_prompt_tokens),
    "mixed": lambda s, limits: PromptTurns(Turns.BESIDE, limits.max_prompt_tokens),
    "chunked": lambda s, limits: PromptTurns(Turns.BESIDE, s.step_tokens, in_pieces=True),
    "prefill_first": lambda s, limits: PromptTurns(Turns.FIRST, s.step_tokens, in_pieces=True),
    "vllm": lambda s, limits: PromptTurns(
        Turns.BESIDE, s.step_tokens, in_pieces=s.enable_chunked_prefill, ahead=s.async_scheduling
    ),
    "sglang": lambda s, limits: PromptTurns(
        Turns.BESIDE if s.sglang.chunked and s.sglang.enable_mixed_chunk else Turns.FIRST,
        s.step_tokens if s.sglang.chunked else s.sglang.max_prefill_tokens,
        in_pieces=s.sglang.chunked,
    ),
    "static": lambda s, limits: PromptTurns(Turns.ROUNDS, limits.max_prompt_tokens),
    "llm_mock": lambda s, limits: PromptTurns(Turns.BESIDE, NEVER),
}
"""Ways to batch, by their names in `scheduler.core.policies`; one from a plug-in counts as `continuous`."""

_NO_LOADS = Loads()
_PAGED = {"paged", "on_demand", "no_evict", "estimated"}


def turns_of(replica: ReplicaSettings) -> PromptTurns:
    """Return how its prompts and decodes share steps."""
    return TURNS.get(batching_name(replica), TURNS["continuous"])(replica, batch_limits(replica))


def adapter_costs(settings: Settings, model: Model) -> AdapterCosts:
    """Return the costs of a model's adapters under these settings, the same live and simulated."""
    own = settings.adapters
    return AdapterCosts(model, own.target_modules, own.host_gb_per_second, own.disk_gb_per_second)


def adapter_loads(settings: Settings, model: Model, work: Workload) -> tuple[int | None, Loads]:
    """Return the number of adapter places on the GPU (None: enough for all), and the load cost of the others.

    All adapters are equally likely: of N adapters, with L places on the GPU and H in host memory, 1 - L/N of the
    requests wait for a load, and 1 - H/N for one from disk.
    """
    own, num_adapters = settings.adapters, work.num_adapters
    if settings.scheduler.strict or own.max_loras is None or num_adapters <= own.max_loras:
        return None, _NO_LOADS
    costs = adapter_costs(settings, model)
    num_loaded = num_adapters - own.max_loras
    in_host = num_adapters if own.host_places is None else max(own.host_places, own.max_loras)
    from_disk = max(0, num_adapters - in_host) / num_loaded
    load_ps = sum(
        count
        * (
            (1 - from_disk) * costs.load_ps(Adapter("", rank), Tier.HOST)
            + from_disk * costs.load_ps(Adapter("", rank), Tier.DISK)
        )
        for rank, count in work.adapters_of_rank.items()
    )
    mean_seconds = load_ps / num_adapters / PS_PER_SECOND
    return own.max_loras, Loads(num_loaded / num_adapters, mean_seconds, own.loading == "blocking")


def room_of(replica: ReplicaSettings, adapter_places: int | None = None, loads: Loads = _NO_LOADS) -> Room:
    """Return how much a replica holds."""
    return Room(
        replica.max_total_token_num,
        replica.block_size if replica.memory in _PAGED else None,
        batch_limits(replica).max_sequences,
        adapter_places,
        loads,
    )
