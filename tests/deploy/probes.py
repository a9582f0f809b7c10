"""The container's health check, as container engines run it."""

import asyncio
import subprocess
import sys

from tests.deploy.files import DEPLOY

SCRIPT = DEPLOY / "healthcheck.py"


async def healthcheck(*arguments: str) -> tuple[int, str]:
    """Run the script; return (exit status, output)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(SCRIPT), *arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()
