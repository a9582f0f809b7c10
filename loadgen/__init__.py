"""The load generator: drives a live cluster, measures as its client would, and reports."""
