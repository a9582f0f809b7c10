"""The journal's file: what is written, when, and what happens when it cannot be."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import lorrery.scheduler.subscribers.journal as module
from lorrery.scheduler.cluster import Cluster
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.cluster_facts import Arrived, Joined
from lorrery.scheduler.core.facts import AdapterLoaded, Cancelled, Facts, Finished, FirstToken
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.plan import Idle, Plan, Ran
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.facts import Decided, Stepped
from lorrery.scheduler.messages import StepReport, Submit, WorkerHello
from lorrery.scheduler.routers import LiveRequest, RouterLink
from lorrery.scheduler.subscribers.journal import Journal
from lorrery.service.errors import LorreryError
from lorrery.service.settings.cluster import Settings, load
from lorrery.simulator.replay.journal import read_journal
from lorrery.simulator.replay.parts import parts_of
from lorrery.simulator.replay.replay import replay
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary import u32
from lorrery.vocabulary.endings import FinishReason

HELLO = WorkerHello("w", "A10G", "Llama-2-7B", 1, 6000, "roofline", needs_prompts=False)


def settings_with(path: Path, *overrides: str) -> Settings:
    return load(None, [f"scheduler.journal='{path}'", *overrides])


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def step(start_ps: int, end_ps: int) -> StepReport:
    return StepReport(1, start_ps, Ran(1, end_ps), b"\1\0\0\0", b"\2\0\0\0", hand_back=False)


def live(sequence: Sequence) -> LiveRequest:
    return LiveRequest(sequence, None, 1, "r", "", b"", pb.Sampling(seed=1))  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.fixture
def journal(path: Path) -> Journal:
    return Journal(path, settings_with(path), {})


def test_the_header_is_there_at_once_and_says_what_a_replay_needs(path: Path) -> None:
    journal = Journal(path, settings_with(path, "scheduler.policy='fcfs'", "model='Llama-3-8B'"), {})
    (header,) = lines_of(path)
    journal.close()
    assert (header["format_version"], header["kind"]) == (11, "journal")
    assert header["settings"]["model"] == "Llama-3-8B"
    assert header["settings"]["scheduler"]["policy"] == "fcfs"
    assert "journal" not in header["settings"]["scheduler"]
    assert "router" not in header["settings"]
    assert Settings.model_validate(header["settings"]).scheduler.policy == "fcfs"


def test_steps_of_one_plan_are_one_line_and_precede_the_next_plan(path: Path, journal: Journal) -> None:
    member = Member("w", build_replica(ReplicaSettings("fcfs", max_total_token_num=1000, max_req_total_len=100)))
    facts, sequence = Facts([journal]), Sequence(7, 10, 4)
    facts.publish([Joined(member, HELLO)], 5, member)
    plan = Plan(100, 9, decode=True)
    facts.publish([Decided(plan, 0.0)], 100, member)
    facts.publish([Stepped(plan, step(100, 110), 1, 0, 0.0, [FirstToken(sequence, 110)])], 110, member)
    facts.publish([Stepped(plan, step(113, 125), 1, 3, 0.0, [])], 125, member)
    facts.publish([Decided(Plan(125, 9, decode=True), 0.0)], 125, member)  # goes on as before: nothing to say
    ended = Finished(sequence, FinishReason.EOS, 4, 140)
    facts.publish([Stepped(plan, step(125, 140), 1, 0, 0.0, [ended])], 140, member)
    facts.publish([Decided(Idle(None, events=[Cancelled(sequence, 4)]), 0.0)], 140, member)
    journal.close()
    _, attached, first, steps, idle, end = lines_of(path)
    assert (attached["worker"], attached["hello"]["gpu"]) == (0, "A10G")
    assert first == {"type": "plan", "worker": 0, "at_ps": 100, "decode": True}
    assert steps["start_ps"] == 100
    assert steps["durations_ps"] == [10, 12, 15]
    assert steps["gaps_ps"] == [[1, 3]]
    assert steps["events"] == [
        [0, {"first_tokens": [7]}],
        [2, {"finished": [[7, "eos", 4]], "phases": [[140, 0, 0, 0]]}],
    ]
    assert len(steps["checksums"]) == 3
    assert idle == {"type": "plan", "worker": 0, "at_ps": 140, "idle": True, "cancelled": [7]}
    assert end == {"type": "end"}


def test_prompts_are_noted_only_where_a_replay_needs_them(tmp_path: Path) -> None:
    sequence = Sequence(1, 3, 5, prompt_token_ids=(4, 5, 6))
    for name, overrides in (("without", ()), ("with", ("scheduler.prefix_cache.kind='blocks'",))):
        path = tmp_path / name
        journal = Journal(path, settings_with(path, *overrides), {1: live(sequence)})
        Facts([journal]).publish([Arrived(sequence)], 0)
        journal.close()
        assert lines_of(path)[1].get("prompt_token_ids") == ([4, 5, 6] if name == "with" else None)


def test_a_priority_is_noted_unless_it_is_0(path: Path) -> None:
    lives: dict[int, LiveRequest] = {}
    journal = Journal(path, settings_with(path), lives)
    for handle, priority in ((1, -2), (2, 0)):
        sequence = Sequence(handle, 3, 5)
        sequence.priority = priority
        lives[handle] = live(sequence)
        Facts([journal]).publish([Arrived(sequence)], 0)
    journal.close()
    assert [line.get("priority") for line in lines_of(path)[1:3]] == [-2, None]


def test_an_earlier_journal_is_kept_under_another_name(path: Path) -> None:
    for _ in range(3):
        Journal(path, settings_with(path), {}).close()
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "journal.jsonl",
        "journal.jsonl.1",
        "journal.jsonl.2",
    ]


def test_a_path_that_cannot_be_written_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "no" / "journal.jsonl"
    with pytest.raises(LorreryError, match=r"scheduler\.journal: .*journal\.jsonl: No such file"):
        Journal(path, settings_with(path), {})


async def test_lines_reach_the_file_while_the_scheduler_runs(
    path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.001)
    rounds = iter(range(2))
    second = asyncio.Event()

    def gather() -> None:
        if next(rounds, None) is None:
            second.set()

    keeping = asyncio.create_task(journal.keep_flushed(gather))
    Facts([journal]).publish([AdapterLoaded("a", 8, 9)], 5)
    await second.wait()
    keeping.cancel()
    await asyncio.wait([keeping])
    assert lines_of(path)[1] == {"type": "adapter", "at_ps": 5, "adapter_id": "a", "rank": 8, "version": 9}
    journal.close()


def test_a_disk_that_fails_ends_the_journal_and_nothing_else(path: Path, journal: Journal) -> None:
    class Full:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    journal._file.close()
    journal._file = Full()  # type: ignore[assignment]
    Facts([journal]).publish([AdapterLoaded("a", 8, 9)], 5)
    journal._write()
    Facts([journal]).publish([AdapterLoaded("b", 8, 9)], 6)
    journal.close()
    assert len(lines_of(path)) == 1


def test_a_pipe_or_device_is_refused_and_stays_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.ndjson"
    os.mkfifo(path)
    with pytest.raises(LorreryError, match="File exists"):
        Journal(path, settings_with(path), {})
    assert path.is_fifo()


@pytest.mark.parametrize("drains", [False, True])
async def test_an_idle_worker_that_goes_before_it_decides_leaves_no_decision_to_replay(
    path: Path, drains: bool
) -> None:
    cluster = Cluster(settings_with(path, "model='Llama-2-7B'", "worker.gpu='A10G'"), CollectorRegistry())
    router = RouterLink("router", cluster.clock, 10**9)
    worker = cluster.attach(replace(HELLO, max_total_token_num=11680))
    await asyncio.sleep(0)
    cluster.requests.submit(
        Submit(0, "r0", "", "t", u32.pack(range(5)), 5, pb.Sampling(seed=1, max_new_tokens=5)), router
    )
    if drains:
        cluster.drain_worker(worker)
        await asyncio.sleep(0)
    cluster.detach(worker)
    assert cluster.journal is not None
    cluster.journal.close()
    read = read_journal(path)
    assert replay(read, parts_of(read, path)).differences == []
