"""The load and the throughput of an engine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """The load of an engine.

    Attributes:
        num_unstarted_tokens: prompt tokens of this port's requests without output.
        tokens_per_second: tokens written by this router to all its clients, per wall second.
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
        """Share of the KV pool in use."""
        return self.kv_tokens / self.max_kv_tokens if self.max_kv_tokens else 0.0
