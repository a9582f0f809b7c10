import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.harness import wait_until

OPEN = 7
# Stands in for the first library that would open something.
CHECK = f"""
import os, sys
assert [os.stat(os.devnull).st_rdev] * 3 == [os.fstat(number).st_rdev for number in range(3)]
assert all(map(os.get_inheritable, range(3)))
for stream in (sys.stdout, sys.stderr):
    print("nothing comes of it", file=stream, flush=True)
assert sys.stdin.read() == ""
os._exit({OPEN})
"""


@pytest.mark.parametrize(
    "arguments", [["scheduler"], ["worker"], ["router"], ["loadgen"], ["cli", "load"], ["cli", "up"], ["cli", "web"]]
)
async def test_a_program_with_closed_standard_streams_has_open_ones_before_it_imports(
    tmp_path: Path, arguments: list[str]
):
    library = tmp_path / "grpc" / "__init__.py"
    library.parent.mkdir()
    library.write_text(CHECK)
    service, *rest = arguments
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", f"lorrery.{service}", *rest),
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert await process.wait() == OPEN


async def test_a_load_without_standard_streams_ends_as_with_them():
    command = ["load", "--target", "127.0.0.1:1", "--connect-timeout", "0.01", "-n", "1"]
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "lorrery.cli", *command)
    )
    assert await process.wait() == 1


@contextlib.contextmanager
def written_to(path: Path) -> Iterator[int]:
    number = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    yield number
    os.close(number)


async def with_unread_output(*command: str) -> tuple[int, bytes]:
    """Return the exit code and the standard error of a command whose output has lost its reader from the start."""
    reading, writing = os.pipe()
    os.close(reading)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lorrery.cli", *command), stdout=writing, stderr=asyncio.subprocess.PIPE
    )
    os.close(writing)
    _, error = await process.communicate()
    assert process.returncode is not None
    return process.returncode, error


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--help", 0),
        ("plan", 0),
        ("config --all", 0),
        ("simulate --help", 0),
        ("report nowhere", 1),
        ("simulate --rate nan", 2),
    ],
)
async def test_an_output_without_a_reader_changes_no_exit_code(command: str, code: int):
    found, error = await with_unread_output(*command.split())
    assert found == code
    assert b"Traceback" not in error
    assert b"BrokenPipe" not in error


async def test_files_are_written_whole_though_nobody_reads_the_report(tmp_path: Path):
    assert await with_unread_output("simulate", "-n", "1", "--out", str(tmp_path / "out")) == (0, b"")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"summary.json", "requests.csv", "adapters.csv", "report.html"}


async def test_what_the_encoding_lacks_is_written_as_its_code():
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lorrery.cli", "simulate", "--help"),
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "40"},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert b"\\u2026" in out


FULL_THEN_ROOM = """
import os, sys
from lorrery.service.telemetry.log import configure, get_logger
from lorrery.service.settings.sections import LogSettings
from lorrery.service.entry_point import set_up_standard_streams

set_up_standard_streams()
configure(LogSettings(format="json"), "test")
log = get_logger("test")
file = os.dup(2)
log.info("first")
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
log.info("second")
log.info("third")
print("fourth", file=sys.stderr, flush=True)
os.dup2(file, 2)
log.info("fifth")
log.info("sixth")
"""


async def test_a_log_without_room_loses_lines_and_counts_them():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", FULL_THEN_ROOM, stderr=asyncio.subprocess.PIPE)
    _, log = await process.communicate()
    assert process.returncode == 0
    events = [json.loads(line) for line in log.splitlines()]
    assert [(event["event"], event.get("lines_lost")) for event in events] == [
        ("first", None),
        ("fifth", 3),
        ("sixth", None),
    ]


CUT_IN_A_LINE = """
import os, resource, sys
from lorrery.service.entry_point import set_up_standard_streams

set_up_standard_streams()
resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))
print("a line of 15 by", file=sys.stderr, flush=True)
print("is cut off", file=sys.stderr, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("whole again", file=sys.stderr, flush=True)
"""


async def test_a_line_of_the_log_that_was_cut_off_does_not_run_into_the_next(tmp_path: Path):
    with written_to(tmp_path / "log") as log:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", CUT_IN_A_LINE, stderr=log)
        assert await process.wait() == 0
    assert (tmp_path / "log").read_text() == "a line of 15 by\nis c\nwhole again\n"


async def test_a_service_whose_log_has_no_room_runs_until_it_is_stopped(tmp_path: Path):
    announcement = tmp_path / "scheduler.json"
    ports = ("--set", "scheduler.listen=127.0.0.1:0", "--set", "scheduler.metrics=127.0.0.1:0")
    with written_to(Path("/dev/full")) as full:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lorrery.scheduler", *ports, "--announce", str(announcement)), stderr=full
        )
    await wait_until(lambda: announcement.exists() or process.returncode is not None, timeout_seconds=60)
    assert process.returncode is None
    process.terminate()
    assert await process.wait() == 0


async def test_a_result_that_cannot_be_written_is_an_error():
    with written_to(Path("/dev/full")) as full:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lorrery.cli", "config"), stdout=full, stderr=asyncio.subprocess.PIPE
        )
        _, error = await process.communicate()
    assert process.returncode == 1
    assert b"No space left on device" in error
