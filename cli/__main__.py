"""`python -m cli` is `lorrery`."""

from cli.main import main

main()
