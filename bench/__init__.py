"""Benchmarks: what the running system costs, and how true its pace is. They report; they are no tests.

Every absolute figure depends on who else uses the machine, so what counts are ratios of two things measured in the same
run. `docs/benchmarks.md` says how to read them.
"""
