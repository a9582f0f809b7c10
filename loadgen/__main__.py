"""`python -m loadgen`: the same as `lorrery load`."""

from chassis.interrupt import exit_on_signals

if __name__ == "__main__":
    exit_on_signals()  # before the imports, which take most of a second
    from loadgen.command import app

    app(prog_name="python -m loadgen")
