"""`python -m lorrery.loadgen`: the same as `lorrery load`."""

from lorrery.service.interrupt import exit_on_signals
from lorrery.service.network.grpc_core import set_up_grpc
from lorrery.service.standard_streams import set_up_standard_streams

if __name__ == "__main__":
    exit_on_signals()  # before the imports, which take most of a second
    set_up_standard_streams()
    set_up_grpc()
    from lorrery.loadgen.command import app

    app(prog_name="python -m lorrery.loadgen")
