"""Reasons why a sequence finished."""

from enum import IntEnum


class FinishReason(IntEnum):
    """Numbered as on the wire (`FinishReason` of types.proto); reports, metrics and journals use `word`."""

    UNSPECIFIED = 0
    EOS = 1
    STOP = 2
    LENGTH = 3
    ABORTED = 4

    @property
    def word(self) -> str:
        """The name in lower case: `eos`, `stop`, ..."""
        return _WORDS[self]

    @classmethod
    def of(cls, number: int) -> "FinishReason":
        """Return the reason with a number from the wire; UNSPECIFIED if this version does not know it."""
        return _BY_NUMBER.get(number, cls.UNSPECIFIED)


_BY_NUMBER = {int(reason): reason for reason in FinishReason}
_WORDS = {reason: reason.name.lower() for reason in FinishReason}
