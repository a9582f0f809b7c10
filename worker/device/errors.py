"""Errors about a requested device. The shell converts them to its own."""


class CatalogueError(ValueError):
    """An unknown GPU, model or engine, or a combination that does not work; the message says what would."""
