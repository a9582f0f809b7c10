"""Replaying golden records: results of the programs that Lorrery models, held against the shipped code.

`replay` reads files and keeps the count; `kinds` lists the kinds of records; each kind has a module of its own that
turns a record into calls of the shipped code and compares what comes back. None of them decides anything itself.
"""
