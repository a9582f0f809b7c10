"""Makes names safe for a terminal: characters that could move its cursor, recolour or reorder text are escaped."""


def plain(text: str) -> str:
    r"""Return `text` with every character that is not printable as an escape: `\x1b`, `\n`, `\u202e`.

    That covers control characters, which a terminal obeys, marks that change the direction of writing, lone
    surrogates, which cannot be written, and blanks other than the space.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
