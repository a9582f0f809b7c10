"""A journal of a live scheduler, run again: the same decisions at the same times, or where they differ."""
