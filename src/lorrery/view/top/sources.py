"""Where the screen's model comes from: a running cluster, which is watched, or a record, which is played."""

import asyncio
import contextlib
import copy
import time
import zlib
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from lorrery.service.errors import FormatError, LorreryError
from lorrery.view.figures import ALERT_SECONDS
from lorrery.view.frame import Feed, Frame, Hello, decode_frame, encode
from lorrery.view.model import Model
from lorrery.view.record import Record
from lorrery.view.top.screen import Look
from lorrery.view.top.tables import plain

RETRY_SECONDS = 1.0
"""Delay before a failed feed is watched again, in wall seconds."""
_SEEK_FRAMES = 10
_MIN_SPEED, _MAX_SPEED = 1 / 64, 1024.0


class Tape:
    """A record in memory with random access: compressed frames, and the new names in each.

    Args:
        record: read completely.

    Raises:
        FormatError: a line is not a frame, or there is no frame.
    """

    def __init__(self, record: Record) -> None:
        self.hello = record.hello
        self.times: list[float] = []
        self._frames: list[bytes] = []
        self._names: list[tuple[list[str], list[str]]] = []
        for frame in record.frames():
            self.times.append(frame.at)
            self._frames.append(zlib.compress(encode(frame), 1))
            self._names.append((frame.adapters_new, frame.tenants_new))
        if not self.times:
            raise FormatError(f"{record.path}: the record has no frame: the run had ended before the first")

    def __len__(self) -> int:
        return len(self.times)

    def frame(self, index: int) -> Frame:
        """Return the frame with this index."""
        return decode_frame(zlib.decompress(self._frames[index]))

    def index_at(self, at: float) -> int:
        """Return the index of the last frame at or before a time, or else of the first."""
        return max(0, bisect_right(self.times, at) - 1)

    def model_at(self, index: int) -> Model:
        """Return the model at a frame, built from the minutes before it and the names of all earlier frames."""
        model = Model(self.hello)
        first = self.index_at(self.times[index] - ALERT_SECONDS)
        for adapters, tenants in self._names[:first]:
            model.learn(adapters, tenants)
        for number in range(first, index + 1):
            model.apply(self.frame(number))
        return model


class Source(Protocol):
    """Provides the model that the screen shows."""

    model: Model

    async def play(self, changed: Callable[[], None]) -> None:
        """Keep the model up to date; call `changed` after each change."""
        ...

    def obey(self, command: str, look: Look) -> None:
        """Execute a command from `keyboard.press`."""
        ...


class Watching:
    """A live feed; after a failure it is watched again, and the screen shows the failure meanwhile.

    Args:
        feed: of the cluster.
        hello: received from the feed.
        hz: frames per second.
        look: its status shows failures.
    """

    def __init__(self, feed: Feed, hello: Hello, hz: float, look: Look) -> None:
        self._feed, self._hello, self._hz, self._look = feed, hello, hz, look
        self._now = self.model = Model(hello)

    async def play(self, changed: Callable[[], None]) -> None:
        """See `Source`."""
        hello: Hello | None = self._hello
        while True:
            try:
                self._now.begin(hello or await self._feed.hello())
                hello = None
                async with contextlib.aclosing(frames_of(self._feed, self._hz)) as frames:
                    async for frame in frames:
                        self._now.apply(frame)
                        self._look.status, self._look.is_trouble = "live", False
                        changed()
            except LorreryError as error:
                self._look.status, self._look.is_trouble = f"LOST, trying again: {plain(str(error))}", True
                changed()
            await asyncio.sleep(RETRY_SECONDS)

    def obey(self, command: str, look: Look) -> None:
        """See `Source`."""
        if command == "pause":
            look.is_paused = not look.is_paused
            self.model = copy.deepcopy(self._now) if look.is_paused else self._now


class Playing:
    """A record, played at a speed that keys change.

    Args:
        tape: the record.
        hz: redraws per second.
        speed: device seconds per wall second.
        look: its status shows the position.
        at: where to begin, paused; None: at the start, running.
    """

    def __init__(self, tape: Tape, hz: float, speed: float, look: Look, at: float | None) -> None:
        self._tape, self._hz, self._speed, self._look = tape, hz, speed, look
        self._index = 0 if at is None else tape.index_at(at)
        self._position = tape.times[self._index]
        look.is_paused = at is not None
        self.model = tape.model_at(self._index)
        self._moved = asyncio.Event()
        self._tell()

    async def play(self, changed: Callable[[], None]) -> None:
        """See `Source`."""
        before = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), 1 / self._hz)
            self._moved.clear()
            now = time.monotonic()
            if not self._look.is_paused:
                self._advance((now - before) * self._speed)
            before = now
            self._tell()
            changed()

    def _advance(self, device_seconds: float) -> None:
        tape = self._tape
        self._position = min(self._position + device_seconds, tape.times[-1])
        wanted = tape.index_at(self._position)
        if wanted - self._index > 200:
            self.model = tape.model_at(wanted)
        else:
            for number in range(self._index + 1, wanted + 1):
                self.model.apply(tape.frame(number))
        self._index = max(self._index, wanted)

    def obey(self, command: str, look: Look) -> None:
        """See `Source`."""
        last = len(self._tape) - 1
        if command == "pause":
            if look.is_paused and self._index == last:
                self._seek(0)
            look.is_paused = not look.is_paused
        elif command in ("back", "on"):
            self._seek(self._index + (_SEEK_FRAMES if command == "on" else -_SEEK_FRAMES))
        elif command in ("faster", "slower"):
            speed = self._speed * (2 if command == "faster" else 0.5)
            self._speed = min(_MAX_SPEED, max(_MIN_SPEED, speed))
        self._moved.set()

    def _seek(self, index: int) -> None:
        self._index = max(0, min(index, len(self._tape) - 1))
        self._position = self._tape.times[self._index]
        self.model = self._tape.model_at(self._index)

    def _tell(self) -> None:
        if self._index == len(self._tape) - 1 and not self._look.is_paused:
            self._look.is_paused = True
        self._look.status = f"record x{self._speed:g} {self._position / max(self._tape.times[-1], 1e-9):.0%}"


async def first_hello(feed: Feed) -> Hello:
    """Return the hello of a feed.

    Raises:
        LorreryError: the feed does not answer; the message suggests what to do.
    """
    try:
        return await feed.hello()
    except LorreryError as error:
        raise LorreryError(f"{error}; --target names the router of a cluster, and lorrery up starts one") from None


async def frames_of(feed: Feed, hz: float) -> AsyncGenerator[Frame, None]:
    """Watch a feed; closing this ends the watch."""
    frames = feed.frames(hz)
    try:
        async for frame in frames:
            yield frame
    finally:
        if isinstance(frames, AsyncGenerator):
            await frames.aclose()
