"""Replays golden records: results of the programs that Lorrery models, compared with the shipped code.

`replay` reads files and counts results; `kinds` lists the kinds of records; each kind has its own module that turns a
record into calls of the shipped code and compares the results. None of them makes decisions itself.
"""
