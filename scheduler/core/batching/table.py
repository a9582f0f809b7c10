"""Ways to batch by the names that settings use: one row each."""

from collections.abc import Callable
from dataclasses import dataclass

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.chunked import Chunked, PrefillFirst
from lorrery.scheduler.core.batching.sglang import Sglang
from lorrery.scheduler.core.batching.slora_loop import SloraLoop
from lorrery.scheduler.core.batching.vllm import Vllm
from lorrery.scheduler.core.batching.whole_prompts import Continuous, LlmMock, Mixed, Static
from lorrery.scheduler.core.policies import batch_limits
from lorrery.scheduler.core.protocols import Batching
from lorrery.scheduler.core.replica_settings import Exclusion, NotIn, ReplicaSettings
from lorrery.vocabulary.units import NEVER


@dataclass(frozen=True, slots=True)
class WayToBatch:
    """A way to batch.

    Attributes:
        build: makes it; None: it comes from outside the tree.
        prompt_bound: whether a whole prompt must be within the limit of one prefill. A resumed or preempted sequence
            is prefilled again with the output it had, so the limit must allow the longest sequence.
        excludes: combinations with other settings that are refused.
        adapter_slots: whether it gives the adapters of each batch their places (`core.adapters.slots`).
        may_overlap: whether it can do without the last step's result (`core.overlap`).
    """

    build: Callable[[ReplicaSettings], Batching] | None
    prompt_bound: bool = True
    excludes: tuple[Exclusion, ...] = ()
    adapter_slots: bool = False
    may_overlap: bool = False


_DOES_NOT_WAIT = Exclusion(
    {"prefetch": {True}},
    "prefetch uses the steps that batching = 'slora_loop' waits before it tries a new batch; other ways to batch do"
    " not wait",
)

BATCHINGS: dict[str, WayToBatch] = {
    "slora_loop": WayToBatch(lambda s: SloraLoop(batch_limits(s), strict=s.strict, prefetch=s.prefetch)),
    "continuous": WayToBatch(lambda s: Continuous(batch_limits(s)), excludes=(_DOES_NOT_WAIT,)),
    "mixed": WayToBatch(lambda s: Mixed(batch_limits(s)), excludes=(_DOES_NOT_WAIT,)),
    "chunked": WayToBatch(
        lambda s: Chunked(BatchLimits(batch_limits(s).max_sequences, s.step_tokens, cached_count=False)),
        prompt_bound=False,
        excludes=(_DOES_NOT_WAIT,),
    ),
    "prefill_first": WayToBatch(
        lambda s: PrefillFirst(BatchLimits(batch_limits(s).max_sequences, s.step_tokens, cached_count=False)),
        prompt_bound=False,
        excludes=(_DOES_NOT_WAIT,),
    ),
    "sglang": WayToBatch(
        lambda s: Sglang(
            BatchLimits(batch_limits(s).max_sequences, s.step_tokens, cached_count=False),
            s.sglang,
            max_loras=s.max_loras,
        ),
        prompt_bound=False,
        excludes=(
            _DOES_NOT_WAIT,
            Exclusion(
                {"policy": NotIn(frozenset({"fcfs_tail", "lpm"}))},
                "batching = 'sglang' is that engine's whole loop: give it policy = 'fcfs_tail' or 'lpm', or take"
                " batching = 'prefill_first'",
            ),
            Exclusion(
                {"memory": NotIn(frozenset({"estimated"}))},
                "batching = 'sglang' admits by what running requests are thought to need: give it memory = 'estimated'",
            ),
            Exclusion(
                {"prefix_cache_kind": NotIn(frozenset({"none", "radix"}))},
                "batching = 'sglang' has that engine's prefix cache: give it prefix_cache.kind = 'radix' or 'none'",
            ),
        ),
        adapter_slots=True,
        may_overlap=True,
    ),
    "vllm": WayToBatch(
        lambda s: Vllm(
            BatchLimits(
                batch_limits(s).max_sequences,
                s.step_tokens,
                partial=s.enable_chunked_prefill,
                max_active=s.max_num_active_seqs,
            ),
            long_prefill_tokens=s.long_prefill_token_threshold or None,
            adaptive=s.long_prefill_token_threshold_adaptive,
            by_priority=s.policy == "priority",
        ),
        prompt_bound=False,
        excludes=(
            _DOES_NOT_WAIT,
            Exclusion(
                {"memory": NotIn(frozenset({"on_demand"}))},
                "batching = 'vllm' takes the blocks of each step as it schedules it: give it memory = 'on_demand'",
            ),
        ),
    ),
    "static": WayToBatch(lambda s: Static(batch_limits(s)), excludes=(_DOES_NOT_WAIT,)),
    "llm_mock": WayToBatch(
        lambda s: LlmMock(BatchLimits(batch_limits(s).max_sequences, NEVER)),
        prompt_bound=False,
        excludes=(_DOES_NOT_WAIT,),
    ),
}

_PLUG_IN = WayToBatch(None)
"""The row of every way to batch from outside the tree (`module:Class`)."""


def way_of(name: str) -> WayToBatch:
    """Return the row of a way to batch; a name that is not in the table is a plug-in."""
    return BATCHINGS.get(name, _PLUG_IN)
