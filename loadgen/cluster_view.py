"""What a run knows of the cluster that it drives, live or simulated."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What a run needs to know of the cluster, and what its report says of it.

    Attributes:
        time_scale: wall seconds per device second.
        max_req_input_len: smallest of the shards', tokens; None if no shard tells.
        max_req_total_len: the same for prompt and output together.
        workers: (kind, number of ready or draining workers), by kind as `count_kinds` names it; None: the server does
            not tell of them.
    """

    model: str
    time_scale: float
    num_shards: int
    num_connected_shards: int
    max_req_input_len: int | None
    max_req_total_len: int | None
    workers: tuple[tuple[str, int], ...] | None
