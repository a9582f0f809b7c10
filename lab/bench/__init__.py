"""Benchmarks: the cost of the running system, and how well it keeps its pace. They report figures; they are not tests.

Every absolute figure depends on other load on the machine, so only ratios of two things measured in the same run count.
`docs/benchmarks.md` explains how to read them.
"""
