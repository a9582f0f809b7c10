"""Placement: which worker serves a new sequence. One rule a file; `scheduler.core.catalogue` names them."""
