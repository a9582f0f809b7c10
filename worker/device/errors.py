"""What can be wrong with a device that is asked for. The shell turns it into an error of its own."""


class CatalogueError(ValueError):
    """A GPU, model or engine that is not known, or that do not go together; the message says what would."""
