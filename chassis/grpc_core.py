"""What gRPC's C core reads from the environment, and cannot be told otherwise.

* It remarks on others' connections: no line of a log, and no JSON.
* Its servers' connections belong to its event engine, whose poller and thread pool pass each message on between them:
  seven switches of threads for a message that is read and one that is written, where the older code, in which the
  thread that waits for what has happened also polls, takes four, and two thirds of the CPU time (grpcio 1.85, Linux;
  `python -m bench step-cpu` has the figures). A name that it does not know it ignores.
"""

import os

VARIABLES = {"GRPC_VERBOSITY": "ERROR", "GRPC_EXPERIMENTS": "-event_engine_listener"}


def set_up_grpc() -> None:
    """Set what the environment leaves open; call it before gRPC is imported."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
