"""Notices that a process is out of file descriptors, which neither of its servers says.

uvloop accepts a connection that it has no descriptor for with one it keeps in reserve, and closes it unanswered; gRPC's
core lets it wait and tries again. What both have in common is that a file cannot be opened meanwhile, so that is tried.
"""

import asyncio
import errno
import os
import resource
import time

from lorrery.chassis.log import get_logger

LOOK_SECONDS = 1.0
SAY_AGAIN_SECONDS = 60.0

_log = get_logger("chassis.open_files")


def any_left() -> bool:
    """Return whether this process could open one more file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True


async def warn_when_none_is_left() -> None:
    """Look every `LOOK_SECONDS`, and warn at most every `SAY_AGAIN_SECONDS`; until cancelled."""
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
