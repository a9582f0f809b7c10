"""A run's description of its cluster, live or simulated."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The facts about a cluster that a run and its report need.

    Attributes:
        time_scale: wall seconds per device second.
        max_req_input_len: smallest of the shards', tokens; None if no shard reports one.
        max_req_total_len: likewise for prompt and output together.
        workers: (kind, number of ready or draining workers), by kind as in `count_kinds`; None: not reported by the
            server.
    """

    model: str
    time_scale: float
    num_shards: int
    num_connected_shards: int
    max_req_input_len: int | None
    max_req_total_len: int | None
    workers: tuple[tuple[str, int], ...] | None
