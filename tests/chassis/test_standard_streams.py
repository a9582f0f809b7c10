import asyncio
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
