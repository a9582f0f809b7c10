"""Detects that a process is out of file descriptors, which neither of its servers reports.

Without a free descriptor uvloop accepts a connection with a reserved one and closes it unanswered; gRPC's core keeps
the connection queued and retries. Opening a file fails in both situations, so that is the test.
"""

import asyncio
import errno
import os
import resource
import time

from lorrery.service.telemetry.log import get_logger

LOOK_SECONDS = 1.0
SAY_AGAIN_SECONDS = 60.0

_log = get_logger("service.network.open_files")


def any_left() -> bool:
    """Return whether this process can open another file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True


async def warn_when_none_is_left() -> None:
    """Check every `LOOK_SECONDS` and warn at most every `SAY_AGAIN_SECONDS`, until cancelled."""
    said_at = -SAY_AGAIN_SECONDS
    while True:
        if not any_left() and (now := time.monotonic()) >= said_at + SAY_AGAIN_SECONDS:
            said_at = now
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            _log.warning(
                "out_of_file_descriptors",
                limit=limit,
                effect="new connections are closed unanswered, or wait",
                cure="raise ulimit -n, or lower router.http_max_connections",
            )
        await asyncio.sleep(LOOK_SECONDS)
