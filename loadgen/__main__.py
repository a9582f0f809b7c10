"""`python -m loadgen`: the same as `lorrery load`."""

from loadgen.command import app

if __name__ == "__main__":
    app(prog_name="python -m loadgen")
