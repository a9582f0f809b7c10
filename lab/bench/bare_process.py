"""Processes of reference programs: started, report their address, and exit when their standard input closes."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import grpc.aio

from lab.bench.cluster import BenchBrokenError
from lorrery.service.entry_point import grpc_variables, grpcio_version
from lorrery.service.local.processes import start_python
from lorrery.service.network.server import bind, new_server
from lorrery.service.settings.sections import TlsSettings

_ROOT = str(Path(__file__).parents[2])
_OPEN_SECONDS, _CLOSE_SECONDS = 30.0, 20.0


@contextlib.asynccontextmanager
async def start_bare(module: str, *arguments: str) -> AsyncIterator[tuple[str, int]]:
    """Run a module in its own process until its standard input closes; yield its first line of output and its pid."""
    process = await _start(module, *arguments)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_OPEN_SECONDS):
            line = await process.stdout.readline()
        if not line:
            raise BenchBrokenError(f"{module} did not start")
        yield line.decode().strip(), process.pid
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()


async def in_own_process(module: str, *arguments: str) -> str:
    """Run a module in its own process to completion; return its output.

    Raises:
        BenchBrokenError: the module failed.
    """
    process = await _start(module, *arguments)
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise BenchBrokenError(f"{module} ended with exit code {process.returncode}")
    return out.decode()


async def _start(module: str, *arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    # start_python passes -P, which removes the current folder from sys.path; these modules are in `_ROOT`.
    paths = os.pathsep.join(path for path in (_ROOT, os.environ.get("PYTHONPATH")) if path)
    chosen = {**grpc_variables(grpcio_version()), **os.environ, "PYTHONPATH": paths}
    return await start_python(["-m", module, *arguments], stdin=pipe, stdout=pipe, variables=chosen)


async def serve_bytes(service: str, handlers: Mapping[str, "grpc.RpcMethodHandler[bytes, bytes]"]) -> None:
    """Serve byte-to-byte methods with a service's options and print the address; return when standard input closes.

    Args:
        service: full service name.
        handlers: by method name.
    """
    server = new_server()
    server.add_registered_method_handlers(service, dict(handlers))
    address = bind(server, "127.0.0.1:0", TlsSettings())
    await server.start()
    print(address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(1.0)
