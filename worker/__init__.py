"""The worker: a mock GPU on the wall clock, attached to one scheduler."""
