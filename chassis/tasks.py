"""Tasks that live and die together."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class _OneEndedError(Exception):
    """Ends a task group from within; never leaves this module."""


async def until_first_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run the coroutines together until one of them returns or raises, then cancel the others.

    Raises:
        BaseExceptionGroup: what the coroutines raised, if one did.
    """

    async def end_all(coroutine: Coroutine[Any, Any, None]) -> None:
        await coroutine
        raise _OneEndedError

    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(end_all(coroutine))
    except* _OneEndedError:
        pass
