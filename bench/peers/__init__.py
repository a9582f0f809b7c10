"""Other simulators on this benchmark's loads: one file for each, run by an interpreter that has the simulator.

A file here imports nothing of this project, and nothing outside the standard library at its top: the interpreter that
runs it need not have the project. It reads lines of JSON, each one run to make, and answers each with a line: CPU
seconds of the run, requests that finished, and the mean time per output token that was simulated, if it is known.
bench/sim_peers.py starts it.
"""
