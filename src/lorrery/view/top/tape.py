"""A record in memory with random access: compressed frames, and the new names in each."""

import zlib
from bisect import bisect_right

from lorrery.service.errors import FormatError
from lorrery.view.frame import Frame, decode_frame, encode
from lorrery.view.record import Record
from lorrery.view.top.model import Model
from lorrery.view.top.series import KEPT_SECONDS


class Tape:
    """The frames of a record.

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
        """Return the model at a frame, built from the minute before it and the names of all earlier frames."""
        model = Model(self.hello)
        first = self.index_at(self.times[index] - KEPT_SECONDS)
        for adapters, tenants in self._names[:first]:
            model.learn(adapters, tenants)
        for number in range(first, index + 1):
            model.apply(self.frame(number))
        return model
