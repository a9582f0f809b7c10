"""`lorrery.engines`: what a test can do with the engines of a fleet, and that none is left over."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lorrery
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.testing import Completion, Engine, Fleet
from tests.cluster.harness import alive, wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with lorrery.engines(2, lora_modules={"sql": 8}, max_loras=2, shutdown_timeout=5, speedup_ratio=100) as fleet:
        yield fleet


def group_of(number: int) -> set[int]:
    """The processes of a group that run."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(group) == number and state != "Z":
            found.add(int(folder.name))
    return found


def complete(engine: Engine, model: str | None = None) -> Completion:
    return engine.complete("hello", model, max_tokens=4, seed=7, ignore_eos=True)


def test_engines_answer_alike_and_each_counts_its_own_requests(fleet: Fleet) -> None:
    first, second = fleet
    assert [one.requests for one in fleet] == [{}, {}]
    answers = [complete(first), complete(second), complete(second, "sql")]
    assert answers[0].token_ids == answers[1].token_ids != answers[2].token_ids
    assert [len(one.token_ids) for one in answers] == [4, 4, 4]
    assert answers[0].finish_reason == "length"
    assert [one.requests for one in fleet] == [{"base": 1}, {"base": 1, "sql": 1}]
    assert second.metrics().value("vllm:generation_tokens_total") == 8
    assert second.metrics().by("adapter", "lorrery_router_adapter_output_tokens_total", adapter="sql") == {"sql": 4}
    with pytest.raises(LookupError, match="no series vllm:generated"):
        first.metrics().value("vllm:generated")


def test_a_fault_is_of_the_engine_that_it_was_injected_into(fleet: Fleet) -> None:
    first, second = fleet
    first.inject("refuse,status=RESOURCE_EXHAUSTED")
    with pytest.raises(LorreryError, match="429"):
        complete(first)
    assert [(one.rule, one.met) for one in first.faults] == [("refuse,status=RESOURCE_EXHAUSTED", 1)]
    assert second.faults == []
    complete(second)
    first.clear_faults()
    assert first.faults == []
    complete(first)
    with pytest.raises(LorreryError, match="refuze"):
        first.inject("refuze")


def test_an_adapter_is_loaded_into_one_engine(fleet: Fleet) -> None:
    first, second = fleet
    first.load_adapter("late", rank=4)
    assert [one.adapters for one in fleet] == [["sql", "late"], ["sql"]]
    complete(first, "late")
    with pytest.raises(LorreryError, match="404"):
        complete(second, "late")
    first.unload_adapter("late")
    assert first.adapters == ["sql"]


def test_a_killed_engine_refuses_connections_until_it_is_restarted_on_its_port(fleet: Fleet) -> None:
    first, second = fleet
    url, pids = first.url, dict(first.pids)
    first.kill()
    assert not [pid for pid in pids.values() if alive(pid)]
    with pytest.raises(LorreryError, match="refused"):
        complete(first)
    complete(second)
    first.restart()
    assert first.url == url
    assert not {*pids.values()} & {*first.pids.values()}
    complete(first)
    assert first.requests == {"base": 1}


def test_a_drained_engine_is_gone_and_can_be_restarted(fleet: Fleet) -> None:
    engine = fleet[1]
    pids = list(engine.pids.values())
    engine.drain()
    assert not [pid for pid in pids if alive(pid)]
    engine.restart()
    complete(engine)


async def test_an_engine_whose_worker_dies_is_gone_and_the_others_serve(fleet: Fleet) -> None:
    first, second = fleet
    os.kill(first.pids["worker-0"], signal.SIGKILL)
    await wait_until(lambda: not [pid for pid in first.pids.values() if alive(pid)])
    complete(second)
    first.restart()
    complete(first)


def test_every_process_is_in_one_group(fleet: Fleet) -> None:
    assert {pid for engine in fleet for pid in engine.pids.values()} < group_of(fleet.process_group)


def test_an_end_leaves_nothing_of_a_fleet_and_the_others_alone(fleet: Fleet) -> None:
    with lorrery.engines(1, "Llama-3-8B", api_key=["secret"]) as other:
        assert other.process_group == fleet.process_group
        (engine,) = other
        assert complete(engine).body["model"] == "Llama-3-8B"
    assert not [pid for pid in engine.pids.values() if alive(pid)]
    complete(fleet[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_lorass": 3}, "--max-lorass: no such flag; did you mean --max-loras"),
        ({"max_loras": "few"}, "got 'few'"),
        ({"model": "Llama-9"}, "model 'Llama-9' is not known"),
        ({"settings": {"scheduler.polizy": "fcfs"}}, "scheduler.polizy: no such setting"),
        ({"port": 8000}, "port: not for an engine of a fleet"),
        ({"ports": [0]}, "2 engines on 1 ports"),
        ({"replicas": 0}, "0 engines on 0 ports"),
    ],
)
def test_a_wrong_argument_is_named_and_starts_nothing(fleet: Fleet, given: dict[str, object], message: str) -> None:
    before = group_of(fleet.process_group)
    with pytest.raises(SettingsError, match=message), lorrery.engines(**{"replicas": 2, **given}):  # type: ignore[arg-type]
        pass
    assert group_of(fleet.process_group) == before


STARTS = """
import lorrery, signal
with lorrery.engines(2) as fleet:
    print(fleet.process_group, flush=True)
    signal.pause()
"""
STARTING = """
import lorrery, lorrery.testing
lorrery.testing.prepare()
print(lorrery.testing._Host._current.pid, flush=True)
with lorrery.engines(2):
    raise SystemExit("it was not interrupted")
"""


def start(program: str, folder: Path) -> tuple["subprocess.Popen[str]", int]:
    """Run a program whose temporary files are in a folder; return it, and the number that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def names_in(folder: Path) -> list[str]:
    return os.listdir(folder)  # noqa: PTH208  names


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_nothing_is_left_of_a_program_that_a_signal_ends(number: signal.Signals, tmp_path: Path) -> None:
    process, group = start(STARTS, tmp_path)
    assert len(group_of(group)) == 8  # the host, its fork server, and three services of each engine
    assert names_in(tmp_path)
    process.send_signal(number)
    process.communicate()
    await wait_until(lambda: not group_of(group))
    assert names_in(tmp_path) == []


async def test_nothing_is_left_of_a_start_that_is_interrupted(tmp_path: Path) -> None:
    process, group = start(STARTING, tmp_path)
    await wait_until(lambda: len(group_of(group)) > 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert "KeyboardInterrupt" in errors
    await wait_until(lambda: not group_of(group))
    assert names_in(tmp_path) == []
