"""Placement: which worker serves a new sequence. Small rules share a file by kind; `table.py` names them."""
