"""What gRPC's C core reads from the environment, and cannot be told otherwise.

* It remarks on others' connections: no line of a log, and no JSON.
* Its connections belong to its event engine, whose poller and thread pool pass each message on between them. The older
  code, in which the thread that waits for what has happened also polls, takes two thirds of the CPU time for a message
  that a server reads and one that it writes (four switches of threads instead of seven), and less than two thirds for
  a message that a client reads (grpcio 1.85, Linux; docs/decisions.md). A name that it does not know it ignores.
"""

import os

VARIABLES = {
    "GRPC_VERBOSITY": "ERROR",
    "GRPC_EXPERIMENTS": "-event_engine_listener,-event_engine_client",
}


def set_up_grpc() -> None:
    """Set what the environment leaves open; call it before gRPC is imported."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
