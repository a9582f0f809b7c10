"""`python -m lorrery.cli` is `lorrery`."""

from lorrery.cli.main import main

main()
