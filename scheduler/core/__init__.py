"""Batch forming without clock or I/O. Start at `replica.py`; `plan.py` has the contract, `policies.py` the names."""
