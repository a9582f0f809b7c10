"""Other simulators on this benchmark's loads: one file for each, run by an interpreter that has the simulator.

A file here imports nothing of this project, and at module level only the standard library: the interpreter that runs it
need not have the project. It reads lines of JSON, one run per line, and responds to each with a line: CPU seconds of
the run, number of finished requests, and the simulated mean time per output token, if known. lab/bench/sim_peers.py
starts it.
"""
