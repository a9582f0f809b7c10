"""What a placement rule sees of a worker."""

from abc import ABC, abstractmethod
from typing import Final

from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.worker.device.pace import Pace

PREDICTED: Final = ("pace", "slowdown", "usual_slowdown", "prompt_share", "waiting_tokens", "output_ratio")
"""Figures that are kept only for a placement that predicts."""


def not_kept(name: str) -> AttributeError:
    """Return the error of a placement that reads one of them, and does not say that it predicts."""
    return AttributeError(f"{name} is kept only for a placement that predicts; give its class `predicts = True`")


@mypyc_attr(allow_interpreted_subclasses=True)
class Candidate(ABC):
    """A worker that could take the sequence: figures of the present, read when they are asked for.

    A base class and no protocol, so that compiled code reads them without looking them up: a candidate of one's own
    derives from it.

    Attributes:
        name: the worker's id; the same for as long as it is attached.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Sequences in its queue."""

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Sequences in its batch, those in prefill included."""

    @property
    @abstractmethod
    def load(self) -> int:
        """Sequences it has, waiting and running."""

    @property
    @abstractmethod
    def kv_tokens(self) -> int:
        """Tokens that the sequences of its batch hold."""

    @abstractmethod
    def has_adapter(self, adapter: Adapter) -> bool:
        """Tell whether an adapter is on its GPU in this version, usable now."""

    @abstractmethod
    def cached_tokens(self, sequence: Sequence) -> int:
        """Return how many leading tokens of the sequence's input its prefix cache holds. Cost: one look-up."""

    @property
    @abstractmethod
    def is_blocked(self) -> bool:
        """Whether those that wait, if any do, could not start when they were tried."""

    @abstractmethod
    def load_ps(self, adapter: Adapter) -> int:
        """Return how long the load of an adapter takes there, by itself: 0 if it is there, half if it is under way."""

    @property
    @abstractmethod
    def pace(self) -> Pace:
        """What its steps take, as announced; see `core.forecast` for this and what follows."""

    @property
    @abstractmethod
    def slowdown(self) -> int:
        """What its last steps took, in thousandths of what its pace says."""

    @property
    @abstractmethod
    def usual_slowdown(self) -> int:
        """The same for all its steps."""

    @property
    @abstractmethod
    def prompt_share(self) -> int:
        """Share of its last steps' time in which running sequences waited for prompts, in thousandths."""

    @property
    @abstractmethod
    def waiting_tokens(self) -> int:
        """Input tokens of the sequences in its queue."""

    @property
    @abstractmethod
    def output_ratio(self) -> int:
        """How much of what they may produce requests do produce lately, in thousandths; the same of all workers."""
