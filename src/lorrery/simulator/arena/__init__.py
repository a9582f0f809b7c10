"""`lorrery compare`: policies on the same requests, with several seeds, and what can be said of their order.

`candidates` reads what is to be compared, `watch` observes one run, `oracle` and `fairness` compute figures of it,
`equal` says why candidates made the same decisions, and `arena` runs and compares all.
"""
