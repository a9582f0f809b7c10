"""`python -m lorrery.loadgen`: the same as `lorrery load`."""

from lorrery.service.entry_point import exit_on_signals, set_up_grpc, set_up_standard_streams

if __name__ == "__main__":
    exit_on_signals()  # before the imports, which take most of a second
    set_up_standard_streams()
    set_up_grpc()
    from lorrery.loadgen.command import app

    app(prog_name="python -m lorrery.loadgen")
