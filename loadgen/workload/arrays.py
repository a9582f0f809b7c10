"""The caller's own requests, column by column: a workload from neither a generator nor a trace reader."""

from array import array
from collections.abc import Hashable, Iterable, Sequence, Sized
from dataclasses import KW_ONLY, dataclass
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from lorrery.loadgen.workload.request import BLOCK_TOKENS, Turn, WorkloadRequest

_NUMBERS = "iufO"
"""Kinds of NumPy arrays that hold numbers; objects may be integers of any size."""


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Columns of one length, one row per request, in any order.

    Attributes:
        at_seconds: send times in device seconds from the start of the run, 0 or later; of a session, its first row's.
        prompt_tokens: lengths of the prompts, at least 1.
        output_tokens: true lengths of the outputs, at least 1; no scheduling decision sees them.
        adapter_id: one adapter for all, or one per request; None: the base model.
        tenant_id: one tenant for all, or one per request.
        hash_ids: per request, the ids of its prompt's blocks: equal leading ids are an equal prefix.
        priority: one for all, or one per request, 32 bits, signed; `scheduler.policy = "priority"` reads it.
        cache_salt: one for all, or one per request: prompts with different ones share no cached prefix.
        block_tokens: prompt tokens of each of `hash_ids`: 16 in Qwen-Bailian's traces, 512 in Mooncake's.
        session_id: per request, its session, or None: each of its rows is sent after the answer to the one before.
            Prompts are whole: what they have in common with earlier ones is in `hash_ids`.
        think_seconds: one for all, or one per request: the time from that answer to the sending.
    """

    at_seconds: ArrayLike
    prompt_tokens: ArrayLike
    output_tokens: ArrayLike
    adapter_id: str | Sequence[str | None] | None = None
    tenant_id: str | Sequence[str] = ""
    hash_ids: Sequence[Sequence[int] | None] | None = None
    priority: ArrayLike = 0
    cache_salt: str | Sequence[str] = ""
    _: KW_ONLY
    block_tokens: int = BLOCK_TOKENS
    session_id: Sequence[Hashable] | None = None
    think_seconds: ArrayLike = 0.0

    def rows(self) -> list[WorkloadRequest]:
        """Return the requests in order of time, the turns of a session together; `index` is the row here.

        Raises:
            ValueError: columns of different lengths, no rows, or a value that no request can have; names the column.
        """
        at_seconds = _column("at_seconds", self.at_seconds, np.float64)
        num_requests = len(at_seconds)
        if not num_requests:
            raise ValueError("at_seconds: there are no requests")
        if not (np.isfinite(at_seconds) & (at_seconds >= 0)).all():
            raise ValueError("at_seconds: every time must be 0 or later")
        prompts, outputs = (
            _column(name, values, np.int64)
            for name, values in (("prompt_tokens", self.prompt_tokens), ("output_tokens", self.output_tokens))
        )
        adapter_ids = _names("adapter_id", self.adapter_id, num_requests, optional=True)
        tenant_ids = [name or "" for name in _names("tenant_id", self.tenant_id, num_requests, optional=False)]
        hash_ids = [None] * num_requests if self.hash_ids is None else _listed("hash_ids", self.hash_ids)
        priorities = _column("priority", _for_all(self.priority, num_requests), np.int64)
        salts = [salt or "" for salt in _names("cache_salt", self.cache_salt, num_requests, optional=False)]
        sessions = [None] * num_requests if self.session_id is None else _listed("session_id", self.session_id)
        thinks = _column("think_seconds", _for_all(self.think_seconds, num_requests), np.float64)
        columns: dict[str, Sized] = {
            "prompt_tokens": prompts,
            "output_tokens": outputs,
            "adapter_id": adapter_ids,
            "tenant_id": tenant_ids,
            "hash_ids": hash_ids,
            "priority": priorities,
            "cache_salt": salts,
            "session_id": sessions,
            "think_seconds": thinks,
        }
        for name, column in columns.items():
            if len(column) != num_requests:
                raise ValueError(f"{name} has {len(column)} rows; at_seconds has {num_requests}")
        for name, tokens in (("prompt_tokens", prompts), ("output_tokens", outputs)):
            if tokens.min() < 1:
                raise ValueError(f"{name}: every request needs at least 1")
        if (priorities != priorities.astype(np.int32)).any():
            raise ValueError(f"priority: expected whole numbers from {-(2**31)} to {2**31 - 1}")
        if not (np.isfinite(thinks) & (thinks >= 0)).all():
            raise ValueError("think_seconds: every time must be 0 or more")
        block_tokens: object = self.block_tokens
        if not isinstance(block_tokens, Integral) or isinstance(block_tokens, bool) or block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens!r}; it must be a whole number, 1 or more")
        for row, (ids, prompt) in enumerate(zip(hash_ids, prompts.tolist(), strict=True)):
            if ids is not None and not _are_ids(ids):
                raise ValueError(f"hash_ids[{row}] is {ids!r}; expected whole numbers from 0 to 2**64 - 1")
            if ids is not None and len(ids) != (wanted := -(-prompt // int(block_tokens))):
                raise ValueError(
                    f"hash_ids[{row}] has {len(ids)} ids; a prompt of {prompt} tokens has {wanted} blocks of"
                    f" {block_tokens} tokens (block_tokens)"
                )
        numbers = (column.tolist() for column in (at_seconds, prompts, outputs, priorities))
        columns_in_order = zip(*numbers, adapter_ids, tenant_ids, hash_ids, salts, strict=True)
        rows = [
            WorkloadRequest(
                *(index, at, prompt, output, adapter_id, tenant_id, None if ids is None else array("Q", ids)),
                priority=priority,
                cache_salt=salt,
                block_tokens=int(block_tokens),
            )
            for index, (at, prompt, output, priority, adapter_id, tenant_id, ids, salt) in enumerate(columns_in_order)
        ]
        firsts = _put_in_sessions(rows, sessions, thinks.tolist())
        return [rows[row] for row in np.lexsort((firsts, at_seconds[firsts])).tolist()]


def _put_in_sessions(
    rows: Sequence[WorkloadRequest], sessions: Sequence[Hashable], thinks: Sequence[float]
) -> npt.NDArray[np.int64]:
    """Make the rows of each session its turns; return the first row of each row's session, itself if it has none."""
    firsts = np.arange(len(rows))
    turns_of: dict[Hashable, list[WorkloadRequest]] = {}
    for row, session in zip(rows, sessions, strict=True):
        if session is not None:
            try:
                turns_of.setdefault(session, []).append(row)
            except TypeError:
                raise ValueError(f"session_id[{row.index}] is {session!r}; expected a text, a number or None") from None
    for turns in turns_of.values():
        for number, row in enumerate(turns if len(turns) > 1 else ()):
            first = firsts[row.index] = turns[0].index
            row.at_seconds = turns[0].at_seconds
            row.turn = Turn(first, number, row.prompt_tokens, thinks[row.index] if number else 0.0, alone=True)
    return firsts


def _for_all(values: ArrayLike, num_requests: int) -> ArrayLike:
    return values if np.ndim(values) else np.full(num_requests, values)


def _are_ids(ids: object) -> bool:
    """Return whether these are ids of one prompt's blocks: integers; a character of a text is not one."""
    return isinstance(ids, Sequence | np.ndarray) and all(
        isinstance(one, Integral) and 0 <= int(one) < 2**64 for one in ids
    )


def _listed(name: str, values: object) -> list[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{name} is {values!r}; expected a list with a row for each request")
    return list(values)


def _names(name: str, values: object, num_requests: int, *, optional: bool) -> list[str | None]:
    """Return a name for each request; a single name applies to all.

    Raises:
        ValueError: a value that is not text, nor, if they are optional, None.
    """
    if alone := isinstance(values, str) or (values is None and optional):
        names: list[str | None] = [values] * num_requests
    else:
        names = _listed(name, values)
    for row, one in enumerate(names[:1] if alone else names):
        if not (isinstance(one, str) or (one is None and optional)):
            raise ValueError(f"{name}[{row}] is {one!r}; expected text{' or None' if optional else ''}")
        if one is not None and not one.isascii() and _has_half_character(one):
            raise ValueError(f"{name}[{row}] is {one!r}; half of a surrogate pair is no text")
    return names


def _has_half_character(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _column(name: str, values: ArrayLike, dtype: type[np.float64] | type[np.int64]) -> npt.NDArray[Any]:
    if np.ma.is_masked(values):
        raise ValueError(f"{name}: some values are masked; fill or leave out their rows")
    given = np.asarray(values)
    if given.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got {given.ndim}")
    if given.dtype.kind not in _NUMBERS:
        raise ValueError(f"{name}: expected numbers, got {given.dtype}")
    if dtype is np.int64 and given.dtype.kind == "f" and not np.isfinite(given).all():
        raise ValueError(f"{name}: expected whole numbers; one is infinite or missing (nan)")
    try:
        column = given.astype(dtype)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected numbers, got {given.dtype}") from None
    except OverflowError:
        raise ValueError(f"{name}: a number is too large; at most {np.iinfo(np.int64).max} can be held") from None
    if dtype is np.int64 and not np.array_equal(column, given):
        raise ValueError(f"{name}: expected whole numbers")
    return column
