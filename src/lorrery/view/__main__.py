"""`python -m lorrery.view`: the same as `lorrery web`."""

from lorrery.service.entry_point import exit_on_signals, set_up_grpc, set_up_standard_streams

if __name__ == "__main__":
    exit_on_signals()  # before the imports, which take most of a second
    set_up_standard_streams()
    set_up_grpc()

from lorrery.view.command import app


def main() -> None:
    """Run `python -m lorrery.view`; never returns normally."""
    app(prog_name="lorrery web")


if __name__ == "__main__":
    main()
