"""Turns the files of runs into one HTML page: for `lorrery report`, and for `load` and `simulate` with `--out`.

The rooms that run things write files; this one depends only on those files. `read.py` makes runs from folders,
`report.py` a page from runs. docs/load.md describes the page and its formulas.
"""
