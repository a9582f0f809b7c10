"""`lorrery simulate --sweep`: one simulation for each combination of some values, over all cores or a cluster's.

`axes` reads what is swept, `points` makes settings and options of each combination, `outcome` runs one, `processes` and
`backends` run many, `store` keeps what is done, `claims` and `share` divide points among sweeps of one folder, `table`
and `plot` show it, and `run` is the whole. docs/simulator.md, "Sweeps", says how to use it.
"""

if __name__ != "lorrery.sweeps":
    raise ImportError("this is lorrery.sweeps: a second copy under the name " + __name__ + " would not be the same")
