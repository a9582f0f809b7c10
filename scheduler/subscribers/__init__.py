"""Subscribers of the facts: journal, metrics, engine series, traces, history for page and terminal, KV events."""
