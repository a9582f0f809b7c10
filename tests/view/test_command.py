"""`lorrery web` as a process."""

import asyncio
import json
import re
from pathlib import Path

from lorrery.service.local.processes import start_python
from tests.view.fake import fake_record


async def test_it_logs_as_the_settings_say_and_names_the_port_that_it_has(tmp_path: Path):
    record = tmp_path / "record.ndjson.gz"
    fake_record(record, 2.0)
    arguments = [
        "-m",
        "lorrery.cli",
        "web",
        str(record),
        "--host",
        "0.0.0.0",
        "--port",
        "0",
        "--set",
        "log.format=json",
    ]
    process = await start_python(arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(60):
            assert process.stdout is not None
            assert process.stderr is not None
            port = re.search(rb":(\d+)\n", await process.stdout.readline())
            said = json.loads(await process.stderr.readline())
    finally:
        process.terminate()
        await process.wait()
    assert port is not None
    assert (said["event"], said["listen"]) == ("open_to_everybody", f"0.0.0.0:{port[1].decode()}")
