"""Keeps gRPC's core from printing: what it remarks on others' connections is no line of a log, and no JSON."""

import os


def quiet_grpc() -> None:
    """Let gRPC's core print errors only, unless the environment says otherwise; call it before gRPC is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
