"""Studies: questions about batching, each answered by one command that writes a table and a figure."""
