"""Every command of docs/plug-ins.md does what the page says, from a folder with nothing but the page's examples."""

import asyncio
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lorrery.service.local.processes import start_python

pytestmark = pytest.mark.cluster

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "plug-ins.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(block.replace("\\\n", " ")) for block in re.findall(r"```sh\n(lorrery .*?)\n```", PAGE, re.DOTALL)
]
UP, LOAD = (next(command for command in COMMANDS if command[1] == name) for name in ("up", "load"))
ALONE = [command for command in COMMANDS if command not in (UP, LOAD)]
FREE_PORTS = [
    "scheduler.listen=127.0.0.1:0", "scheduler.metrics=127.0.0.1:0", "worker.metrics=127.0.0.1:0",
    "router.listen=127.0.0.1:0", "router.metrics=127.0.0.1:0", "router.http=127.0.0.1:0",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("patient.py", "patient_fast.py"):
        shutil.copy(DOCS / "examples" / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LORRERY_CONFIG", raising=False)
    return tmp_path


def run(command: list[str]) -> str:
    short = ["--seconds", "2"] if command[1] == "validate" else []
    done = subprocess.run(
        [sys.executable, "-P", "-m", "lorrery.cli", *command[1:], *short],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=os.environ | {"COLUMNS": "140"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("command", ALONE, ids=lambda command: " ".join(command[1:4]))
def test_a_command_of_the_page_runs(command: list[str], folder: Path) -> None:
    output = run(command)
    if "--out" in command:
        assert (folder / command[command.index("--out") + 1] / "sweep.png").exists()
    if command[1] == "validate":
        assert "no fault" in output


@pytest.mark.usefixtures("folder")
async def test_the_live_commands_of_the_page_run_together() -> None:
    overrides = [part for setting in FREE_PORTS for part in ("--set", setting)]
    up = await start_python(
        ["-m", "lorrery.cli", *UP[1:], *overrides], stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        assert up.stdout is not None
        lines: list[str] = []
        while "try: lorrery load --target" not in (line := (await up.stdout.readline()).decode()):
            assert line, "".join(lines)
            lines.append(line)
        assert "patient:Patient" in "".join(lines)
        output = await asyncio.to_thread(run, [*LOAD, "--target", line.split()[-1]])
        assert "100" in output
        up.send_signal(signal.SIGINT)
        await asyncio.wait_for(up.communicate(), 60)
        assert up.returncode == 0
    finally:
        if up.returncode is None:
            up.kill()
            await up.wait()
