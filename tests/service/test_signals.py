import asyncio
import os
import signal
from pathlib import Path

import pytest

from lorrery.service.entry_point import ECHO_SECONDS, NO_SCHEDULER_TO_COME, handled_by
from lorrery.service.local.processes import start_python
from tests.cluster.harness import wait_until

# Stands in for a library that takes long to import.
SLOW = """
import os, pathlib, signal
pathlib.Path(os.environ["MARK"]).touch()
while True:
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "arguments", [["scheduler"], ["worker"], ["router"], ["loadgen"], ["cli", "demo"], ["cli", "load"], ["cli", "up"]]
)
async def test_a_signal_while_a_program_imports_ends_it_without_a_word(
    tmp_path: Path, arguments: list[str], number: signal.Signals
):
    slow, mark = tmp_path / "grpc" / "__init__.py", tmp_path / "mark"
    slow.parent.mkdir()
    slow.write_text(SLOW)
    process = await start_python(
        ["-m", f"lorrery.{arguments[0]}", *arguments[1:]],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        variables={"PYTHONPATH": str(tmp_path), "MARK": str(mark)},
    )
    await wait_until(mark.exists)
    process.send_signal(number)
    out, _ = await process.communicate()
    assert (process.returncode, out.decode()) == (128 + number, "")


async def test_a_router_that_is_only_just_starting_survives_what_routers_are_told(tmp_path: Path):
    slow, mark = tmp_path / "grpc" / "__init__.py", tmp_path / "mark"
    slow.parent.mkdir()
    slow.write_text(SLOW)
    process = await start_python(
        ["-m", "lorrery.router"],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        variables={"PYTHONPATH": str(tmp_path), "MARK": str(mark)},
    )
    await wait_until(mark.exists)
    process.send_signal(NO_SCHEDULER_TO_COME)
    process.send_signal(signal.SIGTERM)  # behind it: a higher number is handled later
    await process.communicate()
    assert process.returncode == 128 + signal.SIGTERM


async def test_a_signal_that_comes_twice_at_once_is_one():
    """As coreutils' timeout sends it, to a command and then to the command's group."""
    got: list[signal.Signals] = []
    with handled_by(asyncio.get_running_loop(), got.append):
        for number in range(3):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0)
            await wait_until(lambda: len(got) == number + 1)  # noqa: B023
            await asyncio.sleep(2 * ECHO_SECONDS)
    assert got == [signal.SIGTERM] * 3


async def test_handlers_are_put_back_after_the_loops_own():
    received: list[int] = []
    came = asyncio.Event()

    def note(number: signal.Signals) -> None:
        received.append(number)
        came.set()

    def before(number: int, _frame: object) -> None:
        received.append(-number)

    original = signal.signal(signal.SIGTERM, before)
    try:
        with handled_by(asyncio.get_running_loop(), note, (signal.SIGTERM,)):
            os.kill(os.getpid(), signal.SIGTERM)
            await came.wait()
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, original)
    assert received == [signal.SIGTERM]
