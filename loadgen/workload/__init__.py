"""PURE: workloads (generators, trace readers, adapter popularity) and the figures of a run. No clock, no I/O."""
