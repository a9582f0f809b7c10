import asyncio
import json
import signal
from pathlib import Path

import pytest

from lorrery.service.local.processes import start_python
from tests.cluster.harness import alive, descendants, wait_until, write_settings

pytestmark = pytest.mark.cluster

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def trace(folder: Path, *rows: tuple[float, int, int]) -> Path:
    path = folder / "trace.csv"
    lines = [f"2023-11-16 18:15:{second:010.7f},{prompt},{output}\n" for second, prompt, output in rows]
    path.write_text(HEADER + "".join(lines))
    return path


async def start(tmp_path: Path, trace_file: Path) -> asyncio.subprocess.Process:
    arguments = ["--config", str(write_settings(tmp_path)), "--workers", "1", "--trace", str(trace_file)]
    return await start_python(
        ["-m", "lorrery.cli", "demo", *arguments, "--out", str(tmp_path / "out")],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def test_demo_plays_a_trace_and_leaves_results_and_logs(tmp_path: Path):
    process = await start(tmp_path, trace(tmp_path, (1, 100, 8), (1.1, 200, 4), (1.3, 50, 1)))
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    folder = tmp_path / "out"
    assert json.loads((folder / "summary.json").read_text())
    assert len((folder / "requests.csv").read_text().splitlines()) == 1 + 3
    for name in ("router", "scheduler", "worker-0"):
        assert "stopped" in (folder / f"{name}.log").read_text()


async def test_demo_fails_if_a_request_fails(tmp_path: Path):
    process = await start(tmp_path, trace(tmp_path, (1, 100, 8), (1.1, 5000, 4)))  # max_req_input_len is 2048
    out, _ = await process.communicate()
    assert process.returncode == 1, out.decode()


async def test_wrong_settings_leave_no_folder(tmp_path: Path):
    out = tmp_path / "out"
    process = await start_python(
        ["-m", "lorrery.cli", "demo", "--set", "scheduler.max_num_seqs=0", "--out", str(out)],
        stderr=asyncio.subprocess.PIPE,
    )
    _, error = await process.communicate()
    assert process.returncode == 2
    assert b"scheduler.max_num_seqs" in error
    assert not out.exists()


@pytest.mark.parametrize("moment", ["starting", "loading"])
async def test_ctrl_c_at_any_moment_leaves_no_process(tmp_path: Path, moment: str):
    process = await start(tmp_path, trace(tmp_path, (1, 100, 3000), (40, 100, 8)))
    awaited = {"starting": "lorrery.service.local.fork_server", "loading": "lorrery.loadgen"}[moment]
    seen: dict[int, str] = {}

    def started() -> bool:
        seen.update(descendants(process.pid))
        return awaited in seen.values()

    await wait_until(started, 60)
    process.send_signal(signal.SIGINT)
    out, _ = await process.communicate()
    assert process.returncode == 130, out.decode()
    assert "Traceback" not in out.decode()
    assert not [pid for pid in seen if alive(pid)]


async def test_no_process_survives_a_killed_demo(tmp_path: Path):
    process = await start(tmp_path, trace(tmp_path, (1, 100, 3000), (40, 100, 8)))
    await wait_until(lambda: "lorrery.loadgen" in descendants(process.pid).values(), 60)
    pids = descendants(process.pid)
    assert len(pids) == 5  # fork server, three services, load generator
    process.kill()
    await process.communicate()
    await wait_until(lambda: not any(alive(pid) for pid in pids))
