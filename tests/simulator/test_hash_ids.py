"""Prompts that a trace knows by hash ids: nobody makes their tokens, and nothing comes out otherwise than with them."""

import pytest

from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.placements.prefix_match import PrefixMatch
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter
from lorrery.simulator import build
from lorrery.simulator.engine import Simulation
from lorrery.simulator.unread_prompt import UnreadPrompt
from tests.simulator.fuzz_cases import step_time_model

ADAPTERS = {"a": Adapter("a", 8)}
# Of two kinds of beginning, some with more of it than others; the pool holds a few of them, so blocks are evicted.
WORKLOAD = [
    WorkloadRequest(
        index,
        index / 3,
        tokens := 300 + 331 * (index % 7),
        1 + 40 * (index % 3),
        ("a", None)[index % 5 > 0],
        hash_ids=(*range(10 * (index % 2), 10 * (index % 2) + -(-tokens // 512) - 1), index % 4),
    )
    for index in range(60)
]


@pytest.mark.parametrize("block_size", [4, 16, 48, 768])
def test_a_run_by_hash_ids_equals_one_by_tokens(block_size: int) -> None:
    runs = []
    for by_hash_ids in (True, False):
        settings = ReplicaSettings(
            "fcfs", 9_000, 4_000, "chunked", "paged", block_size, prefix_cache="blocks", max_num_batched_tokens=700
        )
        workers = build.build_workers(2, settings, step_time_model("roofline"), build_replica)
        requests = build.build_requests(WORKLOAD, "Llama-2-7B", ADAPTERS, with_prompts=True, by_hash_ids=by_hash_ids)
        done = list(Simulation(workers, PrefixMatch()).run(requests))
        told = [(r.handle, r.worker, r.first_token_ps, r.finished_ps, r.first_cached_tokens) for r in done]
        caches = [worker.replica.prefix_cache for worker in workers]
        counts = [(c.num_unpinned, c.num_evictions) for c in caches if isinstance(c, BlockCache)]
        runs.append((told, counts))
    assert runs[0] == runs[1]
    assert sum(cached for *_, cached in runs[0][0])
    assert sum(evictions for _, evictions in runs[0][1])


def test_tokens_of_a_prompt_that_is_known_by_hash_ids_can_be_read() -> None:
    prompts = []
    for by_hash_ids in (True, False):
        requests = build.build_requests(WORKLOAD[:1], "m", ADAPTERS, with_prompts=True, by_hash_ids=by_hash_ids)
        prompts.append(next(requests)[1].sequence.prompt_token_ids)
    unread, tokens = prompts
    assert isinstance(unread, UnreadPrompt)
    assert unread._token_ids is None
    assert len(unread) == len(tokens) == 300
    assert (list(unread), unread[3], list(unread[2:5])) == (list(tokens), tokens[3], list(tokens[2:5]))


@pytest.mark.parametrize(
    ("kind", "block_size", "suffice"), [("blocks", 16, True), ("blocks", 1, False), ("trie", 16, False)]
)
def test_tokens_are_compared_where_they_may_be_equal_by_chance(kind: str, block_size: int, suffice: bool) -> None:
    assert build.hash_ids_suffice(kind, block_size) is suffice
