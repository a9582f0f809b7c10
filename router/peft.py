"""Adapters as PEFT keeps them: a folder with `adapter_config.json`, whose `r` is the rank.

What vLLM refuses to load is refused (vllm/lora/peft_helper.py: `_validate_features`, `validate_legal`). It does not
look at `peft_type`, but loads no adapter of another type than LORA: the config lacks `lora_alpha`, or the weights have
other names.

A client names the folder, so the file may be anything: only a regular file is read, and only `MAX_CONFIG_BYTES` of it.
A file system that does not answer holds a thread, not the event loop, and neither the request nor the end of the
process waits for that thread.
"""

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from lorrery.chassis.errors import FormatError, InvalidRequest, UnknownName
from lorrery.chassis.names import cut, quoted

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
"""Upper bound on a config, which has a few KB."""
_SAVED = ("classifier", "score")
"""Modules beside the matrices that vLLM takes, for models that classify."""
CONFIG_SECONDS = 10.0
"""Time limit for reading a config: disks and network file systems that are well take milliseconds."""
MAX_READS = 16
"""Configs that are read at once; further ones wait, within the same time limit."""


class Config(NamedTuple):
    """What counts of an adapter's config.

    Attributes:
        rank: of its matrices, at least 1.
        target_modules: projections that it changes; empty: not known.
    """

    rank: int
    target_modules: frozenset[str]


class ConfigReader:
    """Reads configs in threads of its own.

    Args:
        max_lora_rank: of the deployment.
    """

    def __init__(self, max_lora_rank: int) -> None:
        self._max_lora_rank = max_lora_rank
        self._free_reads = asyncio.Semaphore(MAX_READS)

    async def read(self, folder: str) -> Config:
        """Return the config in a folder on this machine.

        Raises:
            UnknownName: there is none.
            InvalidRequest: it cannot be used, or reading it takes more than `CONFIG_SECONDS`.
        """
        field = {"field": "source_path", "value": quoted(folder)}
        try:
            async with asyncio.timeout(CONFIG_SECONDS):
                return await self._read_in_thread(folder)
        except FileNotFoundError as error:
            raise UnknownName(
                f"No adapter found for {quoted(folder)}: it has no {CONFIG} ({error.strerror}); give a PEFT folder on"
                " the router's machine",
                **field,
            ) from None
        except FormatError as error:
            raise InvalidRequest(f"the adapter in {quoted(folder)} cannot be loaded: {error}", **field) from None
        except TimeoutError:
            raise InvalidRequest(
                f"{CONFIG} in {quoted(folder)} was not read within {CONFIG_SECONDS:g} s, behind at most"
                f" {MAX_READS - 1} others; give a folder whose file system answers",
                **field,
                limit=CONFIG_SECONDS,
            ) from None

    async def _read_in_thread(self, folder: str) -> Config:
        loop = asyncio.get_running_loop()
        await self._free_reads.acquire()
        answer: asyncio.Future[Config] = loop.create_future()

        def over(found: Config | Exception) -> None:
            self._free_reads.release()
            if answer.done():  # the request waits no longer
                return
            if isinstance(found, Exception):
                answer.set_exception(found)
            else:
                answer.set_result(found)

        def read() -> None:
            found: Config | Exception
            try:
                found = read_config(folder, self._max_lora_rank)
            except (OSError, FormatError) as error:
                found = error
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(over, found)

        # Not a thread of asyncio's pool, which the end of the process would wait for.
        Thread(target=read, name="adapter config", daemon=True).start()
        return await answer


def read_config(folder: str, max_lora_rank: int) -> Config:
    """Return the config in a folder; does not wait for a FIFO's other end, but may for the file system.

    Args:
        folder: of the adapter.
        max_lora_rank: upper bound on the ranks of `rank_pattern`; `r` is left to what loads the adapter.

    Raises:
        FileNotFoundError: there is none.
        FormatError: it cannot be read, is no config of an adapter, or has what vLLM refuses.
    """
    text = _text(folder)
    if len(text) > MAX_CONFIG_BYTES:
        raise FormatError(f"{CONFIG} has more than {MAX_CONFIG_BYTES} bytes; give that of an adapter")
    try:
        config: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{CONFIG} is no JSON: {cut(str(error))}") from None
    if not isinstance(config, dict):
        raise FormatError(f"{CONFIG} is no JSON object; give that of an adapter")
    for field, value, why in _refused(config, max_lora_rank):
        raise FormatError(f"{CONFIG} has {field} = {cut(json.dumps(value))}; {why}")
    rank = config.get("r")
    if type(rank) is not int or not 1 <= rank < 2**32:
        raise FormatError(f"{CONFIG} has r = {cut(json.dumps(rank))}; it must be a rank, 1 or more")
    modules = config.get("target_modules")
    if isinstance(modules, str):
        modules = [modules]
    if not isinstance(modules, list):
        modules = []
    return Config(rank, frozenset(one for one in modules if isinstance(one, str)))


def _refused(config: dict[str, Any], max_lora_rank: int) -> Iterator[tuple[str, object, str]]:
    """Yield each field that vLLM refuses, with its value and the reason."""
    if (kind := config.get("peft_type")) not in (None, "LORA"):
        yield "peft_type", kind, "vLLM loads adapters of the type LORA only"
    if use_dora := config.get("use_dora"):
        yield "use_dora", use_dora, "vLLM does not support DoRA; give an adapter without it"
    saved = config.get("modules_to_save")
    if saved and not (isinstance(saved, list) and all(name in _SAVED for name in saved)):
        yield "modules_to_save", saved, f"vLLM supports {' and '.join(_SAVED)} only; give an adapter without others"
    if (bias := config.get("bias", "none")) != "none":
        yield "bias", bias, 'vLLM supports "none" only; give an adapter without biases'
    ranks = config.get("rank_pattern") or {}
    if not isinstance(ranks, dict):
        yield "rank_pattern", ranks, "it must be an object of ranks by module"
        return
    for module, rank in ranks.items():
        if type(rank) is not int or rank > max_lora_rank:
            yield (
                f"rank_pattern.{cut(module)}",
                rank,
                f"max_lora_rank is {max_lora_rank}; give an adapter of lower rank",
            )


def _text(folder: str) -> bytes:
    try:
        # Without O_NONBLOCK a FIFO would be waited for; with it, a regular file is read as ever.
        number = os.open(Path(folder) / CONFIG, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise FormatError(f"{CONFIG} is no regular file; give that of an adapter")
            with open(number, "rb", closefd=False) as file:
                return file.read(MAX_CONFIG_BYTES + 1)
        finally:
            os.close(number)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror) from None
    except (OSError, ValueError) as error:  # a ValueError is of a path that no file can have
        raise FormatError(f"{CONFIG} cannot be read: {getattr(error, 'strerror', None) or error}") from None
