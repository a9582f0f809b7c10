"""Records of parts that do not exist yet: known, so that they are told apart, but skipped with the reason."""

from collections.abc import Callable

from cli.golden.kind import Record, Skip
from cli.golden.queues import queue_kind


class NotModelled:
    """A kind whose part of the core does not exist yet."""

    def __init__(self, name: str, what: str, detect: Callable[[Record], bool]) -> None:
        """Name the missing part.

        Args:
            name: the kind's name.
            what: the missing part, in words.
            detect: whether a record is of this kind.
        """
        self.name = name
        self._what = what
        self._detect = detect

    def detect(self, record: Record) -> bool:
        """Whether the record is of this kind."""
        return self._detect(record)

    def replay(self, record: Record) -> Skip:
        """Skip the record."""
        del record
        return Skip(f"not modelled yet: {self._what}")


def queue_not_modelled(name: str, what: str) -> NotModelled:
    """Make the kind of a queue that does not exist yet; names are those of `queue_kind`."""
    return NotModelled(name, what, lambda record: queue_kind(record) == name)


def loop_not_modelled(policy: str, what: str) -> NotModelled:
    """Make the kind of the router loop under a policy that does not exist yet."""
    return NotModelled(
        f"router_loop/{policy}", what, lambda record: "steps" in record and record.get("policy") == policy
    )
