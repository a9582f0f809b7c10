"""Entry point of `lorrery`: sets up signals first, so that Ctrl-C in imports prints no traceback; runs `cli.app`."""

import gc

from lorrery.service.entry_point import exit_on_signals, set_up_grpc, set_up_standard_streams


def main() -> None:
    """Run the command `lorrery`; never returns normally."""
    exit_on_signals()
    set_up_standard_streams()
    set_up_grpc()
    gc.disable()  # objects made by imports are permanent; cli.app enables it again
    from lorrery.cli.app import run

    run()
