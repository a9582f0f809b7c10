"""Draws protobuf messages that are wrong, almost right, or no messages at all, from descriptors alone.

`Mutator.message` walks a message's descriptor and gives each field a boundary value of its type, or one of the `hints`
for its name, with which a message comes past the first check. `Mutator.mangled` breaks the bytes of a message that was
valid. Everything comes from one generator, so a seed gives the same bytes again.
"""

import math
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

Hints = Mapping[str, Sequence[Any]]
"""By a field's name: values that the service knows."""

MAX_DEPTH = 6
LARGE = 100_000
"""Bytes of a large string or array, one in `LARGE_EVERY`."""
LARGE_EVERY = 150

_F = FieldDescriptor
_UNSIGNED = frozenset({_F.TYPE_UINT32, _F.TYPE_UINT64, _F.TYPE_FIXED32, _F.TYPE_FIXED64})
_UNSIGNED_32 = (0, 1, 2, 16, 127, 128, 255, 65536, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
_UNSIGNED_64 = (*_UNSIGNED_32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_SIGNED_32 = (0, 1, -1, 2, 16, 127, -128, 65536, 2**31 - 1, -(2**31))
_SIGNED_64 = (*_SIGNED_32, 2**32, 10**12, -(10**12), 2**62, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-6, 5e-324, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan)
_STRINGS = (
    *("", " ", "x", "fuzz", "a b", "\0", "a\nb", "\x1b[31m", "\u202eabc", "\U0001f600", "%s%n{}", "../../etc/passwd"),
    *("NaN", "-1", "1e999999999", "x" * 512, "x" * 513, "x" * 5000, "é" * 600),
)
_BOUNDARIES: dict[int, Sequence[Any]] = {
    **dict.fromkeys((_F.TYPE_UINT32, _F.TYPE_FIXED32), _UNSIGNED_32),
    **dict.fromkeys((_F.TYPE_UINT64, _F.TYPE_FIXED64), _UNSIGNED_64),
    **dict.fromkeys((_F.TYPE_INT32, _F.TYPE_SINT32, _F.TYPE_SFIXED32), _SIGNED_32),
    **dict.fromkeys((_F.TYPE_INT64, _F.TYPE_SINT64, _F.TYPE_SFIXED64), _SIGNED_64),
    _F.TYPE_DOUBLE: _FLOATS,
    _F.TYPE_FLOAT: (*_FLOATS[:7], math.inf, -math.inf, math.nan),
    _F.TYPE_BOOL: (False, True),
}


class Mutator:
    """See the module.

    Args:
        rng: where everything is drawn from.
        hints: for fields of any message.
    """

    def __init__(self, rng: random.Random, hints: Hints | None = None) -> None:
        self._rng = rng
        self._hints = hints or {}
        self._mangles: tuple[Callable[[bytes], bytes], ...] = (
            self._truncate,
            self._flip_bits,
            self._insert,
            self._repeat,
            self._unknown_field,
            self._bad_text,
            self._lie_about_length,
            lambda _data: self._rng.randbytes(self._rng.choice((1, 4, 64))),
            lambda _data: b"\x0b" * self._rng.choice((1, 50, 5000)),  # groups in groups, none of which ends
            lambda _data: b"\xff" * 11,  # a number of more than 64 bits
        )

    # --- messages ---------------------------------------------------------------------------------------------------

    def message(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """Return a message whose fields are set or not, at random, to values at the edges of their types."""
        message = GetMessageClass(descriptor)()
        unset_ratio = self._rng.choice((0.0, 0.2, 0.6))
        for field in descriptor.fields:
            if self._rng.random() < unset_ratio or (field.message_type is not None and depth >= MAX_DEPTH):
                continue
            if field.containing_oneof is not None and message.WhichOneof(field.containing_oneof.name):
                if self._rng.random() < 0.5:
                    continue
                message.ClearField(message.WhichOneof(field.containing_oneof.name))
            self._set(message, field, depth)
        return message

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return
        if field.is_repeated:
            values = getattr(message, field.name)
            for _ in range(self._count(field)):
                if field.message_type is not None:
                    values.add().CopyFrom(self.message(field.message_type, depth + 1))
                else:
                    values.append(self._scalar(field))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(self.message(field.message_type, depth + 1))
        else:
            setattr(message, field.name, self._scalar(field))

    def _count(self, field: FieldDescriptor) -> int:
        if self._rng.randrange(LARGE_EVERY):
            return self._rng.choice((0, 1, 1, 2, 3, 17))
        return 300 if field.message_type is not None or field.type in (_F.TYPE_STRING, _F.TYPE_BYTES) else LARGE

    def _scalar(self, field: FieldDescriptor) -> Any:
        rng = self._rng
        hints = self._hints.get(field.name)
        if hints and rng.random() < 0.7:
            hint = rng.choice(hints)
            if not (isinstance(hint, int) and hint < 0 and field.type in _UNSIGNED):  # fields of one name differ
                return hint
        if field.type == _F.TYPE_STRING:
            return "x" * LARGE if not rng.randrange(LARGE_EVERY) else rng.choice(_STRINGS)
        if field.type == _F.TYPE_BYTES:
            return self.array()
        if field.enum_type is not None:
            return rng.choice([*field.enum_type.values_by_number, 99, -1, 2**31 - 1])
        return rng.choice(_BOUNDARIES[field.type])

    def array(self) -> bytes:
        """Return a packed array of u32, perhaps one cut in the middle of a number."""
        rng = self._rng
        if not rng.randrange(LARGE_EVERY):
            return rng.randbytes(LARGE)
        length = rng.choice((0, 1, 1, 2, 3, 8, 40))
        whole = struct.pack(f"<{length}I", *(rng.choice(_UNSIGNED_32) for _ in range(length)))
        return whole if rng.random() < 0.7 else whole + rng.randbytes(rng.randrange(1, 4))

    # --- bytes ------------------------------------------------------------------------------------------------------

    def mangled(self, data: bytes) -> bytes:
        """Return the bytes of a message broken in one to three ways; some come out as valid as before."""
        for _ in range(self._rng.choice((1, 1, 2, 3))):
            data = self._rng.choice(self._mangles)(data)
        return data

    def _truncate(self, data: bytes) -> bytes:
        return data[: self._rng.randrange(len(data) + 1)]

    def _flip_bits(self, data: bytes) -> bytes:
        flipped = bytearray(data)
        for _ in range(min(len(data), self._rng.choice((1, 2, 8)))):
            flipped[self._rng.randrange(len(flipped))] ^= 1 << self._rng.randrange(8)
        return bytes(flipped)

    def _insert(self, data: bytes) -> bytes:
        at = self._rng.randrange(len(data) + 1)
        return data[:at] + self._rng.randbytes(self._rng.choice((1, 2, 16))) + data[at:]

    def _repeat(self, data: bytes) -> bytes:
        """Every field twice: of a message the two are merged, of a number the last one counts."""
        return data + data[self._rng.randrange(len(data) + 1) :]

    def _unknown_field(self, data: bytes) -> bytes:
        number = self._rng.choice((15, 2000, 18_999, 2**29 - 1))
        text = self._rng.randbytes(self._rng.choice((0, 5, 1000)))
        return data + _varint(number << 3 | 2) + _varint(len(text)) + text

    def _bad_text(self, data: bytes) -> bytes:
        """A field of the lowest numbers as text that is not UTF-8."""
        return data + _varint(self._rng.randrange(1, 10) << 3 | 2) + b"\x03\xff\xfe\xc0"

    def _lie_about_length(self, data: bytes) -> bytes:
        length = self._rng.choice((len(data) + 1, 2**31 - 1, 2**31, 2**32, 2**63))
        return _varint(self._rng.randrange(1, 10) << 3 | 2) + _varint(length) + data


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))
