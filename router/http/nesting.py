"""How much JSON a client may send, found out before it is parsed: parsed values take up to a hundred times its memory.

Counted are texts, objects and arrays, of which a million take a hundred megabytes and seconds to validate; all values
with numbers, which cost a tenth of that; and levels. A chat template that indents JSON writes a line for each bracket,
as long as its depth: 0.8 MB of brackets nested 900 deep became 2 GB of text. The tools and schemas of real clients are
nested under 30 levels deep.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

MAX_LEVELS = 64
PIECE_BYTES = 1 << 18
"""Counting in so much takes a few milliseconds."""

_OTHERS = bytes(set(range(256)) - set(b'"[]{},'))
_STEPS = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1)}


class Bounds(NamedTuple):
    """How much of it there may be.

    Attributes:
        parts: texts, names of members among them, objects and arrays.
        values: of all kinds.
        why: where these numbers come from, for messages.
    """

    parts: int
    values: int
    why: str = ""

    @classmethod
    def of(cls, max_req_input_len: int, http_max_outputs: int) -> "Bounds":
        """Return the bounds on a request's body.

        A message of a conversation has five parts and makes three tokens or more; of prompts there may be one for each
        output, and of token ids for the longest prompt, beside 256 for each output.
        """
        return cls(
            2 * max_req_input_len + 16 * http_max_outputs,
            max_req_input_len + 256 * http_max_outputs,
            f" (max_req_input_len is {max_req_input_len}, http_max_outputs {http_max_outputs})",
        )


def too_much(json: bytes, bounds: Bounds) -> Iterator[str | None]:
    """Yield for each piece of some JSON why the whole is too much, as the predicate of a sentence; None: it is not yet.

    What is no JSON may be judged either way.
    """
    rest, level, num_quotes, num_brackets, num_values = b"", 0, 0, 0, 1
    for at in range(0, len(json), PIECE_BYTES):
        piece = rest + json[at : at + PIECE_BYTES]
        num_rest = (
            len(piece) - len(piece.rstrip(b"\\"))
        ) % 2  # a backslash that escapes what the next piece begins with
        rest, piece = piece[len(piece) - num_rest :], piece[: len(piece) - num_rest]
        # Escaped backslashes go first, so that the next one escapes what follows it.
        marks = piece.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS)
        is_inside, here = num_quotes % 2, marks.count(b'"')
        num_quotes += here
        if num_quotes <= 2 * bounds.parts:
            outside = b"".join(marks.split(b'"')[is_inside::2])
            brackets = outside.translate(None, b",")
            levels = list(accumulate(map(_STEPS.__getitem__, brackets), initial=level))
            level, deepest = levels[-1], max(levels)
            if deepest > MAX_LEVELS:
                yield f"is nested {deepest} levels deep; at most {MAX_LEVELS} are read; send fewer levels"
                return
            num_brackets += len(brackets)
            num_values += len(outside) - len(brackets) + sum(map(brackets.count, (b"[", b"{")))
        for what, number, most in (
            ("texts, objects and arrays", (num_quotes + num_brackets) // 2, bounds.parts),
            ("values", num_values, bounds.values),
        ):
            if number > most:
                yield f"has over {most} {what}{bounds.why}; send fewer, in several requests"
                return
        yield None
