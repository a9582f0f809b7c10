"""Common parts of both sides of the scheduler's wire; only `wire_routers` and `wire_workers` translate messages."""

from array import array

from lorrery.scheduler.core.sequence import Adapter
from lorrery.scheduler.messages import ProtocolError
from lorrery.service.names import too_long
from lorrery.v1 import types_pb2
from lorrery.vocabulary import u32
from lorrery.vocabulary.adapters import FIGURES, FiguresByAdapter


def numbers(field: str, data: bytes) -> "array[int]":
    """Return the numbers of a u32 array.

    Raises:
        ProtocolError: it ends in the middle of one.
    """
    try:
        return u32.unpack(data)
    except ValueError as error:
        raise ProtocolError(f"{field}: {error}") from None


def count(field: str, data: bytes) -> int:
    """Return the number of entries of a u32 array.

    Raises:
        ProtocolError: it ends in the middle of one.
    """
    if len(data) % u32.ITEM_BYTES:
        return len(numbers(field, data))  # raises the error
    return len(data) // u32.ITEM_BYTES


def check_names(**names: str) -> None:
    """Check that a peer's names and ids, by field, are not too long.

    Raises:
        ProtocolError: one is.
    """
    for field, name in names.items():
        why = too_long(name)
        if why is not None:
            raise ProtocolError(f"{field} {why}")


def write_adapter(adapter: Adapter) -> types_pb2.Adapter:
    """Write an adapter."""
    return types_pb2.Adapter(
        adapter_id=adapter.adapter_id, rank=adapter.rank, version=adapter.version, number=adapter.number
    )


def write_figures(by_adapter: FiguresByAdapter) -> types_pb2.AdapterFigures:
    """Write the figures of adapters."""
    found = types_pb2.AdapterFigures(adapter_ids=by_adapter)
    rows = [figures.shown().values() for figures in by_adapter.values()]
    for name, column in zip(FIGURES, zip(*rows, strict=True), strict=False):
        getattr(found, name).extend(column)
    return found
