"""Adapters of one worker: which are on the GPU and in host memory, their loads, and who uses them."""
