"""How much a constraint may ask for, and what is wrong with one that cannot be met."""

MAX_VALUES, MAX_CHARACTERS, MAX_LEVELS = 2048, 65_536, 64
MAX_STEPS = 50_000
"""Of work for one output: names, alternatives, values of enums and members of classes that are looked at. So many take
some tens of milliseconds."""
MAX_ALL_STEPS = 20 * MAX_STEPS
"""The same for all outputs of one request."""
_STEPS_OF_A_VALUE = 10


class UnmetError(Exception):
    """A constraint cannot be met; the text is the predicate of a sentence."""


class DeadEndError(UnmetError):
    """One way to meet a constraint failed, or is not supported; another one may succeed."""


class Budget:
    """Counts what an output consists of, so that no constraint holds up the other requests of its router.

    Args:
        steps_left: for all outputs of the request.

    Attributes:
        values_left: values that may still be drawn, and schemas read.
        steps: work so far.
    """

    def __init__(self, steps_left: int = MAX_ALL_STEPS) -> None:
        self.values_left = MAX_VALUES
        self.steps = 0
        self._all_steps_left = steps_left
        self._characters_left = MAX_CHARACTERS

    def take_value(self) -> None:
        """Count a value, or a schema.

        Raises:
            UnmetError: there are too many.
        """
        self.values_left -= 1
        self.check_values(0)
        self.take_steps(_STEPS_OF_A_VALUE)

    def check_values(self, num_values: int) -> None:
        """Check that so many values may still be drawn.

        Raises:
            UnmetError: they are too many.
        """
        if self.values_left < num_values:
            raise UnmetError(f"asks for more than {MAX_VALUES} values; ask for fewer")

    def take_steps(self, num_steps: int) -> None:
        """Count work.

        Raises:
            UnmetError: it is too much.
        """
        self.steps += num_steps
        if self.steps > MAX_STEPS:
            raise UnmetError(f"takes more than {MAX_STEPS} steps; give a smaller schema, or ask for fewer values")
        if self.steps > self._all_steps_left:
            raise UnmetError(f"takes more than {MAX_ALL_STEPS} steps in all outputs; ask for fewer outputs or values")

    def take_characters(self, num_characters: int) -> None:
        """Count characters.

        Raises:
            UnmetError: there are too many.
        """
        self._characters_left -= num_characters
        if self._characters_left < 0:
            raise UnmetError(f"asks for more than {MAX_CHARACTERS} characters; ask for fewer")
