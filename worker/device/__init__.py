"""The mock GPU, without clock or I/O: step times, the batch, and the model's output."""
