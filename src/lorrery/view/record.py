"""A record: a file with one hello and the frames of a run, one line of JSON each, compressed with gzip.

If the length of a run is not known in advance, its frames are thinned out: once there are more than `MAX_FRAMES`, every
second one is merged into the next, and the frame interval doubles.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lorrery.service.errors import FormatError, LorreryError
from lorrery.service.files.writing import whole_file
from lorrery.view.frame import MAX_ENDED, MAX_EVENTS, Frame, Hello, decode_frame, decode_hello, encode
from lorrery.vocabulary.files import MAX_FRAMES, RECORD_FILE

_GZIP_MAGIC = b"\x1f\x8b"
_FRAME_LEVEL = 1
"""zlib level while frames are kept; the file uses a higher one."""


class Record:
    """A record to read.

    Args:
        path: the file, or a folder that contains one with the default name.

    Raises:
        LorreryError: it cannot be read.
        FormatError: it is not a record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.is_dir():
                self.path = path / RECORD_FILE
            with self.path.open("rb") as file:
                self.is_compressed = file.read(2) == _GZIP_MAGIC
        except FileNotFoundError:
            what = f"no {RECORD_FILE} there" if path.is_dir() else "no such file"
            raise LorreryError(f"{path}: {what}; `lorrery simulate --record` makes one") from None
        except OSError as error:
            raise LorreryError(f"{self.path}: {error.strerror}") from None
        self.hello = decode_hello_of(self.path, next(self._read_lines(), b""))

    def lines(self, first: float | None = None, last: float | None = None) -> Iterator[bytes]:
        """Yield the hello and the frames as lines, with line ends; see `frames`."""
        if first is None and last is None:
            for line in self._read_lines():
                yield line + b"\n"
            return
        yield encode(self.hello) + b"\n"
        for frame in self.frames(first, last):
            yield encode(frame) + b"\n"

    def frames(self, first: float | None = None, last: float | None = None) -> Iterator[Frame]:
        """Yield the frames.

        Args:
            first: device seconds of the first frame, which also brings the names of all earlier ones.
            last: device seconds of the last frame.

        Raises:
            FormatError: a line is not a frame, or the file is truncated.
        """
        adapters: list[str] = []
        tenants: list[str] = []
        for number, line in enumerate(self._read_lines(), start=1):
            if number == 1:
                continue
            frame = _frame(self.path, number, line)
            if last is not None and frame.at > last:
                return
            if first is not None and frame.at < first:
                adapters += frame.adapters_new
                tenants += frame.tenants_new
                continue
            if adapters or tenants:
                frame = msgspec.structs.replace(
                    frame, adapters_new=adapters + frame.adapters_new, tenants_new=tenants + frame.tenants_new
                )
                adapters, tenants = [], []
            yield frame

    def _read_lines(self) -> Iterator[bytes]:
        try:
            with gzip.open(self.path) if self.is_compressed else self.path.open("rb") as file:
                for line in file:
                    yield line.rstrip(b"\n")
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise FormatError(f"{self.path}: the file is cut off or damaged") from None
        except OSError as error:
            raise LorreryError(f"{self.path}: {error.strerror or error}") from None


def decode_hello_of(path: Path, line: bytes) -> Hello:
    """Parse the first line of a record.

    Raises:
        FormatError: it is not a hello.
    """
    try:
        hello = decode_hello(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: not a record: its first line is not a hello ({error})") from None
    if hello.source != "record":
        raise FormatError(f"{path}: not a record: its hello has source {hello.source!r}")
    return hello


def _frame(path: Path, number: int, line: bytes) -> Frame:
    try:
        return decode_frame(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: line {number} is not a frame ({error})") from None


class Recorder:
    """Keeps the frames of a run until it ends, and writes them.

    Args:
        every_seconds: device seconds between two frames; None: short at first, and doubled as the run gets longer.

    Attributes:
        every: current device seconds between two frames; frame n is at n times that.
    """

    FIRST_EVERY = 0.125
    """Initial interval without `every_seconds`: a power of two, so that times are exact."""

    def __init__(self, every_seconds: float | None = None) -> None:
        self.every = every_seconds or self.FIRST_EVERY
        self._thins_out = every_seconds is None
        self._frames: list[bytes] = []
        self._times: list[float] = []

    @property
    def next_at(self) -> float:
        """Device seconds of the next frame."""
        return len(self._frames) * self.every

    def add(self, frame: Frame) -> None:
        """Append the next frame."""
        self._put(frame)
        if self._thins_out and len(self._frames) > MAX_FRAMES:
            self._thin_out()

    def write(self, path: Path, hello: Hello) -> None:
        """Write the file; fields of `hello` that depend on the frames are filled in.

        Raises:
            LorreryError: it cannot be written.
        """
        first, last = (self._times[0], self._times[-1]) if self._times else (0.0, 0.0)
        whole = msgspec.structs.replace(hello, source="record", first=first, last=last, frame_seconds=self.every)
        try:
            # No file name in the gzip header, so that the same run gives the same bytes.
            with whole_file(path) as whole_record, gzip.GzipFile("", "wb", 6, whole_record, mtime=0) as file:
                file.write(encode(whole) + b"\n")
                for frame in self._frames:
                    file.write(zlib.decompress(frame) + b"\n")
        except OSError as error:
            raise LorreryError(f"{path}: {error.strerror}") from None

    def _put(self, frame: Frame) -> None:
        self._frames.append(zlib.compress(encode(frame), _FRAME_LEVEL))
        self._times.append(frame.at)

    def _thin_out(self) -> None:
        """Keep the first frame and every second one after it; merge the skipped frames into the next kept ones."""
        frames, self._frames, self._times = self._frames, [], []
        skipped: Frame | None = None
        for number, kept in enumerate(frames):
            frame = decode_frame(zlib.decompress(kept))
            if number % 2:
                skipped = frame
            else:
                self._put(frame if skipped is None else joined(skipped, frame))
        self.every *= 2


def joined(skipped: Frame, frame: Frame) -> Frame:
    """Return a frame that also has the names, ended requests and events of the skipped frame before it."""
    position = {worker.id: number for number, worker in enumerate(frame.workers)}
    moved = [
        msgspec.structs.replace(row, worker=position.get(skipped.workers[row.worker].id, -1) if row.worker >= 0 else -1)
        for row in skipped.ended
    ]
    ended = moved + frame.ended
    events = skipped.events + frame.events
    return msgspec.structs.replace(
        frame,
        adapters_new=skipped.adapters_new + frame.adapters_new,
        tenants_new=skipped.tenants_new + frame.tenants_new,
        ended=ended[-MAX_ENDED:],
        ended_more=skipped.ended_more + frame.ended_more + max(0, len(ended) - MAX_ENDED),
        events=events[-MAX_EVENTS:],
        events_more=skipped.events_more + frame.events_more + max(0, len(events) - MAX_EVENTS),
    )
