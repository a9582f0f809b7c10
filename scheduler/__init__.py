"""The scheduler: forms batches for attached workers. `core/` decides, the rest carries."""
