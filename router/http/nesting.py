"""How deeply a client's JSON may be nested.

A chat template that indents JSON writes a line for each bracket, as long as its depth: 0.8 MB of brackets nested 900
deep became 2 GB of text. The tools and schemas of real clients are nested under 30 levels deep.
"""

import re
from itertools import accumulate

MAX_LEVELS = 64

_STRING = re.compile(rb'"[^"]*"')
_OTHERS = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1), ord('"'): 0}


def too_deep(json: bytes) -> str | None:
    """Return why some JSON is nested too deeply, as the predicate of a sentence; None: it is not.

    What is no JSON may be judged either way.
    """
    # Escaped backslashes go first, so that the next one escapes what follows it.
    unescaped = json.replace(rb"\\", b"").replace(rb"\"", b"")
    # Two quotes in a row are an empty string, or one that ends before the next begins: without them, little is left.
    brackets = _STRING.sub(b"", unescaped.translate(None, _OTHERS).replace(b'""', b""))
    levels = max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)
    if levels <= MAX_LEVELS:
        return None
    return f"is nested {levels} levels deep; at most {MAX_LEVELS} are read; send fewer levels"
