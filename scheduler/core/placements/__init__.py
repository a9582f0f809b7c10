"""Placement: which worker serves a new sequence. One rule a file; `table.py` names them."""
