"""Batch forming without clock or I/O. Start at `replica.py`; `plan.py` has the contract, `catalogue.py` the names."""
