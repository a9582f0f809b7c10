"""Opens CSV files, and turns their errors into one line that begins with the path."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from lorrery.service.errors import LorreryError


@contextmanager
def open_csv(path: Path, refusal: type[LorreryError], row_error: type[Exception]) -> Iterator[TextIO]:
    """Open a CSV file for reading.

    Args:
        path: the file; UTF-8, with or without a byte-order mark.
        refusal: class of the error to raise; its message names the file.
        row_error: raised in the body for a bad row or header; its message names the line.

    Raises:
        refusal: the file cannot be read, is not text or CSV, or has an invalid row.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise refusal(f"{path}: no UTF-8 text ({error.reason}); a CSV file is needed") from None
    except OSError as error:
        raise refusal(f"{path}: {error.strerror or error}") from None
    except csv.Error as error:
        raise refusal(f"{path}: no CSV ({error}); save it as CSV with commas and a header") from None
    except row_error as error:
        raise refusal(f"{path}: {error}") from None
