"""The orrery: shows a running cluster, given its address, or a simulation's record, given its file."""
