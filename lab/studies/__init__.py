"""Studies: questions about batching, caches and adapters, each answered by one command with a table and a figure.

`python -m lab.studies` lists them; docs/policies.md shows the results.
"""
