"""Bytes of a trace that may be too many for memory, where block ids and texts wait until their request is read."""

from typing import Protocol


class Spool(Protocol):
    """Takes pieces, and returns each by its place and size."""

    def add(self, piece: bytes) -> int:
        """Add a piece; return its place."""
        ...

    def read(self, place: int, size: int) -> bytes:
        """Return the piece of this place and size."""
        ...


class MemorySpool:
    """A spool in memory."""

    def __init__(self) -> None:
        self._content = bytearray()

    def add(self, piece: bytes) -> int:
        """See `Spool`."""
        place = len(self._content)
        self._content += piece
        return place

    def read(self, place: int, size: int) -> bytes:
        """See `Spool`."""
        return bytes(self._content[place : place + size])
