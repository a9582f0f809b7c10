import asyncio
import os
import sys
from pathlib import Path

import pytest

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
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"summary.json", "requests.csv", "report.html"}


async def test_what_the_encoding_lacks_is_written_as_its_code():
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lorrery.cli", "simulate", "--help"),
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "40"},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert b"\\u2026" in out
