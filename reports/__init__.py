"""From the files of runs to one HTML page: what `lorrery report` does, and `load` and `simulate` with `--out`.

The rooms that run things write files; this one reads them, and knows nothing else of them. `read.py` makes runs of
folders, `page.py` a page of runs. docs/reports.md says what the page shows, and how its figures are computed.
"""

if __name__ != "lorrery.reports":
    raise ImportError("this is lorrery.reports: a second copy under the name " + __name__ + " would not be the same")
