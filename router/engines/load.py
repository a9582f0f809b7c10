"""How full an engine is, and how fast it is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """How full an engine is.

    Attributes:
        num_unstarted_tokens: prompt tokens of this port's requests that have no token yet.
        tokens_per_second: written by this router to all its clients; wall seconds.
    """

    num_running: int
    num_waiting: int
    kv_tokens: int
    max_kv_tokens: int
    max_running: int
    num_unstarted_tokens: int
    tokens_per_second: float

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool that is in use."""
        return self.kv_tokens / self.max_kv_tokens if self.max_kv_tokens else 0.0
