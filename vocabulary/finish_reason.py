"""Why a sequence ended by itself."""

from enum import IntEnum


class FinishReason(IntEnum):
    """The numbers are the wire's (`FinishReason` of types.proto); reports, metrics and journals say `word`."""

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
        """Return the reason with a number off the wire; of a number that this version does not know, UNSPECIFIED."""
        return _BY_NUMBER.get(number, cls.UNSPECIFIED)


_BY_NUMBER = {int(reason): reason for reason in FinishReason}
_WORDS = {reason: reason.name.lower() for reason in FinishReason}
