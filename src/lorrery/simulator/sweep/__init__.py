"""`lorrery simulate --sweep`: one simulation per combination of values, over all cores or a cluster's.

`axes` parses the swept keys, `points` builds settings and options of each combination, `outcome` runs one, `processes`
and `backends` run many, `store` keeps finished points, `claims` and `share` divide points among sweeps of one folder,
`table` and `plot` show the result, and `run` does it all. docs/simulator.md, "Sweeps", describes its use.
"""
