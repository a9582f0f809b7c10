"""The `lorrery` command."""
