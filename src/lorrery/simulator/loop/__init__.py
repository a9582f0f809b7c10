"""The loop under the virtual clock: the core of each scheduler, the mock GPU of each worker. Start at `engine.py`."""
