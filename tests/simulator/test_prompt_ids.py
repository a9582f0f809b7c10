"""Prompts that are compared by ids of their parts: nobody makes their words, and all comes out as with them.

The parts are a trace's blocks, or what a group shares, the turns of a session and their answers.
"""

from dataclasses import replace

import pytest

from lorrery.loadgen.workload.request import Turn, WorkloadRequest
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.placements.by_load import PrefixMatch
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter
from lorrery.simulator.clients import Clients
from lorrery.simulator.lazy_prompt import LazyPrompt
from lorrery.simulator.loop import build
from lorrery.simulator.loop.build import has_ids, ids_suffice
from lorrery.simulator.loop.engine import Simulation
from tests.simulator.fuzz_cases import step_time_model

ADAPTERS = {"a": Adapter("a", 8)}
# Of two kinds of beginning, some with more of it than others; the pool holds a few of them, so blocks are evicted.
TRACE = [
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
PLAIN = [replace(request, hash_ids=None) for request in TRACE]


def blocks(tokens: int) -> list[WorkloadRequest]:
    """Return a trace with smaller blocks, and sessions whose prompts are whole."""
    requests = []
    for index in range(60):
        length = 300 + 331 * (index % 7)
        first, count = 500 * (index % 2), -(-length // tokens)
        ids = (*range(first, first + count // 2), *range(1000 * index, 1000 * index + count - count // 2))
        turn = Turn(index // 3, index % 3, length, 0.5 * (index % 3), alone=True) if index % 5 else None
        requests.append(
            WorkloadRequest(index, index // 3, length, 1 + 40 * (index % 3), None, "", ids, turn, block_tokens=tokens)
        )
    return requests


def chat(shared_tokens: int, groups: int = 2, longer: int = 1) -> list[WorkloadRequest]:
    """Return sessions of three turns, whose own words and answers end within blocks; some are of one word."""
    requests = []
    for session in range(15):
        prompt_tokens = shared_tokens
        for number in range(3):
            index, own = len(requests), 1 + 67 * (session % 3) + 29 * number
            turn = Turn(session, number, own, 0.5 * (number > 0), session % groups, shared_tokens)
            prompt_tokens += own
            output = longer * (1 + 31 * (index % 4))
            adapter_id = "a" if session % 5 == 0 else None
            requests.append(WorkloadRequest(index, session / 2, prompt_tokens, output, adapter_id, turn=turn))
            prompt_tokens += output
    return requests


WORKLOADS = {
    "trace": TRACE,
    "blocks of 16": blocks(16),
    "blocks of 24": blocks(24),
    "blocks of 6": blocks(6),
    "plain": PLAIN,
    "sessions": chat(0),
    "shared": chat(500),
    "shared in words": chat(501),
}


def played(
    workload: list[WorkloadRequest], replica: ReplicaSettings, *, by_ids: bool, **more: bool | int
) -> tuple[list[tuple[object, ...]], list[tuple[int, int]]]:
    """Return what became of each request, and the counts of each cache."""
    workers = build.build_workers(2, replica, step_time_model("roofline"), build_replica)
    builder = build.RequestBuilder("Llama-2-7B", ADAPTERS, with_prompts=True, by_ids=by_ids, **more)  # type: ignore[arg-type]
    done = list(Clients(Simulation(workers, PrefixMatch()), builder).open_loop(workload))
    told = [(r.handle, r.worker, r.first_token_ps, r.finished_ps, r.first_cached_tokens, r.num_requeues) for r in done]
    caches = [worker.replica.prefix_cache for worker in workers]
    return told, [(c.num_unpinned, c.num_evictions) for c in caches if isinstance(c, BlockCache)]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("block_size", [4, 16, 48, 768])
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_run_by_ids_equals_one_by_tokens(name: str, block_size: int, share: bool) -> None:
    replica = ReplicaSettings(
        "fcfs",
        9_000 if name not in ("sessions", "shared", "shared in words") else 3_100,
        4_000 if name not in ("sessions", "shared", "shared in words") else 3_000,
        "chunked",
        "paged",
        block_size,
        prefix_cache="blocks",
        max_num_batched_tokens=700,
        share_within_plan=share,
    )
    told, counts = played(WORKLOADS[name], replica, by_ids=True)
    assert (told, counts) == played(WORKLOADS[name], replica, by_ids=False)
    if block_size < 768:
        assert sum(evictions for _, evictions in counts)
        assert any(cached for *_, cached, _ in told) == (name != "plain")


def test_runs_are_equal_where_answers_end_before_their_length_and_sequences_are_preempted() -> None:
    replica = ReplicaSettings(
        "fcfs", 1_500, 1_400, "chunked", "paged", 16, prefix_cache="blocks", max_num_batched_tokens=700, watermark=0.0
    )
    workload = [replace(one, at_seconds=0.0) for one in chat(64, longer=3)]
    for ignore_eos in (True, False):
        told, counts = played(workload, replica, by_ids=True, ignore_eos=ignore_eos, max_new_tokens=300)
        assert (told, counts) == played(workload, replica, by_ids=False, ignore_eos=ignore_eos, max_new_tokens=300)
        assert sum(preemptions for *_, preemptions in told)  # type: ignore[misc]


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_words_of_a_prompt_that_is_compared_by_ids_can_be_read(name: str) -> None:
    prompts = []
    for by_ids in (True, False):
        builder = build.RequestBuilder("m", ADAPTERS, with_prompts=True, by_ids=by_ids, ignore_eos=False)
        first, second = WORKLOADS[name][:2]
        sent = [builder.build(first, 0)]
        sent[0].output_tokens = sent[0].ending.output_tokens
        said = [(first, builder.said(sent[0]))] if second.turn is not None else []
        sent.append(builder.build(second, 0, said))
        prompts.append([one.sequence.prompt_token_ids for one in sent])
    for unread, tokens in zip(*prompts, strict=True):
        assert isinstance(unread, LazyPrompt) == has_ids(WORKLOADS[name][0])
        assert len(unread) == len(tokens)
        assert (list(unread), unread[0], list(unread[2:5])) == (list(tokens), tokens[0], list(tokens[2:5]))


def test_words_are_compared_where_they_may_be_equal_by_chance() -> None:
    assert ids_suffice("blocks", 16)
    assert not ids_suffice("blocks", 1)
    assert not ids_suffice("trie", 16)
    assert has_ids(chat(64)[0])
    assert not has_ids(chat(65)[0])
    text = Turn(0, 0, 2, text="a b", token_ids=(7, 8))
    assert not has_ids(WorkloadRequest(0, 0.0, 2, 1, turn=text))
