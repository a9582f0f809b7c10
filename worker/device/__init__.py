"""The mock GPU itself, without clock or I/O: step times, the batch, what the model answers."""
