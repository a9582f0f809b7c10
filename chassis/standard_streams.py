"""Standard streams that the parent process has closed (`>&-`, some supervisors): they become the null device.

Otherwise the next file or socket gets the number of one of them, and with it what others write there. libuv aborts as
it closes such a number, and Python has no object for the stream (`sys.stderr` is None). Entry points call this before
their first import that opens anything; this file therefore imports nothing slow.
"""

import os
import sys


def open_standard_streams() -> None:
    """Open each closed standard stream on the null device."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115  for good; typed so
