"""Adapters as PEFT keeps them: a folder with `adapter_config.json`, whose `r` is the rank, and the weights.

What vLLM 0.32 refuses to load is refused (vllm/lora/peft_helper.py: `from_dict`, `_validate_features`,
`validate_legal`; lora_model.py: `from_local_checkpoint`). Of the weights only what makes them readable counts: the
header of `adapter_model.safetensors`, the directory of `adapter_model.bin` or `.pt`. vLLM does not compare their shapes
with `r`, and neither does this. It loads a `peft_type` other than LORA, if the rest is that of one (`quirks`).

A client names the folder, so the files may be anything: only regular files are read, and only `MAX_CONFIG_BYTES` and
`MAX_HEADER_BYTES` of them. A file system that does not answer holds a thread, not the event loop, and neither the
request nor the end of the process waits for that thread.
"""

import asyncio
import contextlib
import json
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import IO, Any, NamedTuple
from zipfile import is_zipfile

from lorrery.service.errors import FormatError, InvalidRequest, UnknownName
from lorrery.service.names import cut, quoted

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
"""Upper bound on a config, which has a few KB."""
WEIGHTS = "adapter_model.safetensors"
_PICKLED = ("adapter_model.bin", "adapter_model.pt")
MAX_HEADER_BYTES = 16 << 20
"""Upper bound on the header of the weights, which has 150 bytes for each tensor."""
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_UNREADABLE = "Error while deserializing header: "
"""Begins vLLM's texts about a file of safetensors."""
_REQUIRED = ("r", "lora_alpha", "target_modules")
_UNSUPPORTED = {
    "use_dora": "vLLM does not yet support DoRA.",
    "lora_bias": "vLLM does not support LoRA bias (lora_bias).",
    "alora_invocation_tokens": "vLLM does not support Activated LoRA (aLoRA).",
    "layer_replication": "vLLM does not support layer_replication.",
    "use_bdlora": "vLLM does not support block-diagonal LoRA (BD-LoRA).",
    "use_qalora": "vLLM does not support QALoRA.",
}
_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of `init_lora_weights` that vLLM takes, as it does any that is no text."""
_OTHER_INITS = (
    "Inits such as PiSSA, OLoRA, CorDA and LoftQ modify the base model weights when PEFT loads the adapter. Convert it"
    " to a regular LoRA adapter with PEFT's path_initial_model_for_weight_conversion, or set init_lora_weights to true"
    " if the served base model already contains the modified weights."
)
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


class BrokenAdapterError(FormatError):
    """An adapter cannot be loaded.

    Args:
        message: the reason.
        theirs: in vLLM's words; None: as `message`.
    """

    def __init__(self, message: str, theirs: str | None = None) -> None:
        super().__init__(message)
        self.theirs = message if theirs is None else theirs


class AdapterReader:
    """Reads adapters in threads of its own.

    Args:
        max_lora_rank: of the deployment.
        quirks: take what vLLM takes by mistake.
    """

    def __init__(self, max_lora_rank: int, *, quirks: bool = False) -> None:
        self._max_lora_rank = max_lora_rank
        self._quirks = quirks
        self._free_reads = asyncio.Semaphore(MAX_READS)

    async def read(self, folder: str) -> Config:
        """Return the config of the adapter in a folder on this machine.

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
            raise InvalidRequest(f"the adapter in {quoted(folder)} cannot be loaded: {error}", **field) from error
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
                found = read_adapter(folder, self._max_lora_rank, quirks=self._quirks)
            except (OSError, FormatError) as error:
                found = error
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(over, found)

        # Not a thread of asyncio's pool, which the end of the process would wait for.
        Thread(target=read, name="adapter config", daemon=True).start()
        return await answer


def read_adapter(folder: str, max_lora_rank: int, *, quirks: bool = False) -> Config:
    """Return the config of the adapter in a folder, whose weights can be read; see `read_config`."""
    config = _read(folder)
    if missing := [name for name in _REQUIRED if name not in config]:
        names = ", ".join(repr(name) for name in missing)
        message = f"{CONFIG} has no {' and no '.join(missing)}; give that of an adapter"
        raise BrokenAdapterError(message, f"Missing required configuration fields: {{{names}}}")
    found = _checked(config, max_lora_rank, quirks=quirks)
    if not isinstance(alpha := config["lora_alpha"], int | float):
        raise BrokenAdapterError(
            f"{CONFIG} has lora_alpha = {cut(json.dumps(alpha))}; it must be a number",
            f"unsupported operand type(s) for /: {type(alpha).__name__!r} and 'int'",
        )
    _check_weights(folder)
    return found


def read_config(folder: str, max_lora_rank: int) -> Config:
    """Return the config in a folder; does not wait for a FIFO's other end, but may for the file system.

    Args:
        folder: of the adapter.
        max_lora_rank: upper bound on the ranks of `rank_pattern`; `r` is left to what loads the adapter.

    Raises:
        FileNotFoundError: there is none.
        FormatError: it cannot be read, is no config of an adapter, or has what vLLM refuses.
    """
    return _checked(_read(folder), max_lora_rank, quirks=False)


def _read(folder: str) -> dict[str, Any]:
    with _opened(Path(folder) / CONFIG) as file:
        text = file.read(MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise BrokenAdapterError(f"{CONFIG} has more than {MAX_CONFIG_BYTES} bytes; give that of an adapter")
    try:
        config: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenAdapterError(f"{CONFIG} is no JSON: {cut(str(error))}", cut(str(error))) from None
    if not isinstance(config, dict):
        theirs = f"{type(config).__name__} indices must be integers or slices, not str"
        raise BrokenAdapterError(f"{CONFIG} is no JSON object; give that of an adapter", theirs)
    return config


def _checked(config: dict[str, Any], max_lora_rank: int, *, quirks: bool) -> Config:
    rank = config.get("r")
    if type(rank) is not int or not 1 <= rank < 2**32:
        raise BrokenAdapterError(
            f"{CONFIG} has r = {cut(json.dumps(rank))}; it must be a rank, 1 or more",
            f"LoRA rank `r` must be a positive integer, got {cut(str(rank))}.",
        )
    for field, value, why, theirs in _refused(config, max_lora_rank):
        if not (quirks and field == "peft_type"):
            raise BrokenAdapterError(f"{CONFIG} has {field} = {cut(json.dumps(value))}; {why}", theirs)
    modules = config.get("target_modules")
    if isinstance(modules, str):
        modules = [modules]
    if not isinstance(modules, list):
        modules = []
    return Config(rank, frozenset(one for one in modules if isinstance(one, str)))


def _refused(config: dict[str, Any], max_lora_rank: int) -> Iterator[tuple[str, object, str, str]]:
    """Yield each field that vLLM refuses, with its value and the reason, in our words and in vLLM's."""
    if (kind := config.get("peft_type")) not in (None, "LORA"):
        why = "vLLM loads adapters of the type LORA only"
        yield "peft_type", kind, why, f"{why}, and this has peft_type {cut(json.dumps(kind))}"
    ranks = config.get("rank_pattern") or {}
    if not isinstance(ranks, dict):
        yield "rank_pattern", ranks, "it must be an object of ranks by module", "'list' object has no attribute 'items'"
        return
    for module, rank in ranks.items():
        theirs = f"LoRA rank {rank} is greater than max_lora_rank {max_lora_rank}."
        if type(rank) is not int or rank < 1:
            theirs = (
                f"LoRA rank for `{cut(module)}` in `rank_pattern` must be a positive integer, got {cut(str(rank))}."
            )
        elif rank <= max_lora_rank:
            continue
        why = f"max_lora_rank is {max_lora_rank}; give an adapter of lower rank"
        yield f"rank_pattern.{cut(module)}", rank, why, theirs
    saved = config.get("modules_to_save")
    if saved and not (isinstance(saved, list) and all(name in _SAVED for name in saved)):
        theirs = 'vLLM only supports modules_to_save being either None or ["classifier", "score"] for classification'
        theirs += f" models. Unsupported modules_to_save: {[name for name in saved if name not in _SAVED]}"
        why = f"vLLM supports {' and '.join(_SAVED)} only; give an adapter without others"
        yield "modules_to_save", saved, why, theirs
    for field, theirs in _UNSUPPORTED.items():
        if value := config.get(field):
            yield field, value, f"{theirs.removesuffix('.').replace(' yet', '')}; give an adapter without it", theirs
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _INITS:
        why = "it changes the base model's weights; give a regular LoRA adapter"
        yield (
            "init_lora_weights",
            init,
            why,
            f"vLLM does not support init_lora_weights={cut(repr(init))}. {_OTHER_INITS}",
        )
    if (bias := config.get("bias", "none")) != "none":
        why = 'vLLM supports "none" only; give an adapter without biases'
        yield "bias", bias, why, "Adapter bias is not supported."


# --- weights ----------------------------------------------------------------------------------------------------------


def _check_weights(folder: str) -> None:
    """Check that a folder has weights that can be read.

    Raises:
        BrokenAdapterError: it has not.
    """
    with contextlib.suppress(FileNotFoundError), _opened(Path(folder) / WEIGHTS) as file:
        _check_header(file, os.fstat(file.fileno()).st_size)
        return
    for name in _PICKLED:
        with contextlib.suppress(FileNotFoundError), _opened(Path(folder) / name) as file:
            # PyTorch's format is a zip archive; before 1.6 it was a pickle, from protocol 2 on.
            if not is_zipfile(file) and not (file.seek(0) == 0 and file.read(2) == b"\x80\x02"):
                raise BrokenAdapterError(f"{name} is no file of PyTorch", "unpack requires a buffer of 4 bytes")
            return
    raise BrokenAdapterError(
        f"it has neither {WEIGHTS} nor {_PICKLED[0]}; give the folder of a whole adapter",
        f"{folder} doesn't contain tensors",
    )


def _check_header(file: IO[bytes], file_bytes: int) -> None:
    """Check that a file of safetensors has tensors, whose bytes are all there and nothing else.

    The format: the header's length as a little-endian u64, the header as JSON, and the bytes of the tensors.
    """
    if file_bytes < 8:
        raise BrokenAdapterError(f"{WEIGHTS} is cut short", f"{_UNREADABLE}header too small")
    (header_bytes,) = struct.unpack("<Q", file.read(8))
    if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise BrokenAdapterError(f"{WEIGHTS} has no header of safetensors", f"{_UNREADABLE}header too large")
    try:
        header: Any = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        spans = sorted(_span(tensor) for tensor in header.values())
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        theirs = f"{_UNREADABLE}invalid shape, data type, or offset for tensor"
        raise BrokenAdapterError(f"{WEIGHTS} has an invalid header", theirs) from None
    if not spans:
        raise BrokenAdapterError(f"{WEIGHTS} has no tensors", "")
    ends = [0, *(end for _, end in spans)]
    if (
        any(begin != end for (begin, _), end in zip(spans, ends, strict=False))
        or ends[-1] != file_bytes - 8 - header_bytes
    ):
        theirs = f"{_UNREADABLE}incomplete metadata, file not fully covered"
        raise BrokenAdapterError(f"{WEIGHTS} is cut short, or has bytes of no tensor", theirs)


def _span(tensor: Any) -> tuple[int, int]:  # noqa: ANN401  what JSON may hold
    """Return where the bytes of a tensor begin and end. Raises an error of any kind if it has none."""
    begin, end = tensor["data_offsets"]
    num_bytes = _ITEM_BYTES[tensor["dtype"]]
    for size in tensor["shape"]:
        if type(size) is not int or not 0 <= size < 2**48 or num_bytes >= 2**64:
            raise ValueError(size)
        num_bytes *= size
    if not (type(begin) is type(end) is int and end - begin == num_bytes and begin >= 0):
        raise ValueError(begin, end)
    return begin, end


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file for reading.

    Raises:
        FileNotFoundError: there is none.
        BrokenAdapterError: it is something else, or cannot be read.
    """
    try:
        # Without O_NONBLOCK a FIFO would be waited for; with it, a regular file is read as ever.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise BrokenAdapterError(f"{path.name} is no regular file; give that of an adapter")
            with open(number, "rb", closefd=False) as file:
                yield file
        finally:
            os.close(number)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror) from None
    except (OSError, ValueError) as error:  # a ValueError is of a path that no file can have
        raise BrokenAdapterError(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
