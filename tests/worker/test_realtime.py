"""In processes of their own, some of an ordinary user: a test must not change the priority of the one that runs it."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from lorrery.service.errors import SettingsError
from lorrery.worker.timekeeping import take_realtime_priority
from tests.cluster.harness import wait_until

HEAD = """
import json, os, resource, threading
from lorrery.service.errors import SettingsError
from lorrery.worker.timekeeping import LITTLE_CPU, MOST_CPU, take_realtime_priority

def policies():
    return sorted({os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")})

def as_nobody(most_priority):
    resource.setrlimit(resource.RLIMIT_RTPRIO, (most_priority, most_priority))
    os.setuid(65534)

waiting = threading.Event()
threading.Thread(target=waiting.wait, daemon=True).start()
"""


def _is_granted() -> bool:
    code = "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
needs_priority = pytest.mark.skipif(not _is_granted(), reason="no real-time priority on this machine")


def run(code: str) -> object:
    done = subprocess.run([sys.executable, "-c", HEAD + dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_priority
def test_all_threads_have_it_and_those_that_start_later():
    found = run("""
        before = policies()
        take_realtime_priority("auto")
        threading.Thread(target=waiting.wait, daemon=True).start()
        print(json.dumps([before, policies()]))
    """)
    assert found == [[os.SCHED_OTHER], [os.SCHED_RR]]


@needs_priority
def test_a_process_that_takes_much_cpu_returns_it_until_it_takes_little():
    found = run("""
        priority, seen = take_realtime_priority("required"), []
        between = (MOST_CPU + LITTLE_CPU) / 2
        for share in (MOST_CPU, MOST_CPU * 1.01, between, LITTLE_CPU, LITTLE_CPU * 0.99, between):
            priority.adjust(share)
            seen += policies()
        print(json.dumps(seen))
    """)
    ordinary, realtime = os.SCHED_OTHER, os.SCHED_RR
    assert found == [realtime, ordinary, ordinary, ordinary, realtime, realtime]


@needs_priority
def test_its_own_cpu_is_what_counts():
    found = run("""
        import asyncio, time
        async def main():
            priority, seen = take_realtime_priority("auto"), []
            keeping = asyncio.create_task(priority.keep())
            await asyncio.sleep(0)
            while os.SCHED_OTHER not in seen:  # it computes all the time
                until = time.monotonic() + 0.1
                while time.monotonic() < until: pass
                await asyncio.sleep(0)
                seen = policies()
            while os.SCHED_RR not in seen:  # it computes nothing
                await asyncio.sleep(0.01)
                seen = policies()
            print(json.dumps(seen))
        asyncio.run(asyncio.wait_for(main(), 60))
    """)
    assert found == [os.SCHED_RR]


@needs_priority
@needs_root
def test_a_limit_of_one_is_enough_for_an_ordinary_user():
    found = run("""
        try:
            as_nobody(1)
        except ValueError:  # raising the limit takes CAP_SYS_RESOURCE
            print(json.dumps(None))
        else:
            take_realtime_priority("required")
            print(json.dumps(policies()))
    """)
    if found is None:
        pytest.skip("this root may not raise a limit")
    assert found == [os.SCHED_RR]


@needs_root
def test_without_permission_it_stays_an_ordinary_process():
    found = run('as_nobody(0); print(json.dumps([take_realtime_priority("auto"), policies()]))')
    assert found == [None, [os.SCHED_OTHER]]


@needs_root
def test_required_without_permission_says_how_to_get_it():
    found = run("""
        as_nobody(0)
        try:
            take_realtime_priority("required")
        except SettingsError as error:
            print(json.dumps(str(error)))
    """)
    assert found == (
        "worker.realtime: no real-time priority, which 'required' asks for: Operation not permitted; allow it with"
        " ulimit -r 1, Docker's --ulimit rtprio=1 or CAP_SYS_NICE, or set 'auto'"
    )


def test_a_system_without_it(monkeypatch):
    monkeypatch.delattr(os, "sched_param")
    assert take_realtime_priority("auto") is None
    with pytest.raises(SettingsError, match="this system has none"):
        take_realtime_priority("required")


def test_off_is_off():
    assert take_realtime_priority("off") is None
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@needs_priority
@pytest.mark.parametrize(("setting", "policy"), [("required", os.SCHED_RR), ("off", os.SCHED_OTHER)])
async def test_a_cluster_gives_it_to_workers_only(start_cluster, setting, policy):
    cluster = await start_cluster(f"worker.realtime={setting}")

    def policies(name: str) -> set[int]:
        found: set[int] = set()
        for thread in Path(f"/proc/{cluster.processes[name].pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                found.add(os.sched_getscheduler(int(thread.name)))
        return found

    await wait_until(lambda: policies("worker-0") == {policy})
    for name in cluster.processes.keys() - {"worker-0"}:
        assert policies(name) == {os.SCHED_OTHER}
