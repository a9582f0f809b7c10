"""The entry point of `lorrery`: signals first, so that Ctrl-C while it imports is no traceback, then `cli.app`."""

import gc

from lorrery.chassis.grpc_core import set_up_grpc
from lorrery.chassis.interrupt import exit_on_signals
from lorrery.chassis.standard_streams import set_up_standard_streams


def main() -> None:
    """Be the command `lorrery`; never returns normally."""
    exit_on_signals()
    set_up_standard_streams()
    set_up_grpc()
    gc.disable()  # what imports make stays; cli.app enables it again
    from lorrery.cli.app import run

    run()
