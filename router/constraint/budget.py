"""How much a constraint may ask for, and what is wrong with one that cannot be met."""

MAX_VALUES, MAX_CHARACTERS, MAX_LEVELS = 2048, 65_536, 64
MAX_STEPS = 50_000
"""Of work: names, alternatives and values of enums that are looked at. This many take some tens of milliseconds."""


class UnmetError(Exception):
    """A constraint cannot be met, or uses what is not supported; the text is the predicate of a sentence."""


class DeadEndError(UnmetError):
    """One way to meet a constraint failed; another one may not."""


class Budget:
    """Counts what an output consists of, so that no constraint holds up the other requests of its router.

    Attributes:
        values_left: values that may still be drawn, and schemas read.
    """

    def __init__(self) -> None:
        self.values_left = MAX_VALUES
        self._characters_left = MAX_CHARACTERS
        self._steps_left = MAX_STEPS

    def take_value(self, num_values: int = 1) -> None:
        """Count values.

        Raises:
            UnmetError: there are too many.
        """
        self.values_left -= num_values
        if self.values_left < 0:
            raise UnmetError(f"asks for more than {MAX_VALUES} values; ask for fewer")

    def take_steps(self, num_steps: int) -> None:
        """Count work.

        Raises:
            UnmetError: it is too much.
        """
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise UnmetError(f"takes more than {MAX_STEPS} steps; give a smaller schema, or ask for fewer values")

    def take_characters(self, num_characters: int) -> None:
        """Count characters.

        Raises:
            UnmetError: there are too many.
        """
        self._characters_left -= num_characters
        if self._characters_left < 0:
            raise UnmetError(f"asks for more than {MAX_CHARACTERS} characters; ask for fewer")
