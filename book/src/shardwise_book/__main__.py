"""`python -m shardwise_book`: builds the book in this folder, and says where to open it."""

import signal
import sys
from pathlib import Path

import click
from jupyter_book.cli.main import main

from . import extension

PAGE = Path("_build/html/index.html")
RECORD = Path("_build/.doctrees", extension.FINISHED)


def build() -> int:
    """Run Jupyter Book; its exit status, without the trace of its own code below the message."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends kernels too
    try:
        main(["build", ".", "--quiet", "--warningiserror", "--keep-going"], standalone_mode=False)
    except (RuntimeError, click.ClickException) as error:
        print(error, file=sys.stderr)
        return 1
    if not RECORD.exists():
        print("The book was not built: its build did not come to a good end.", file=sys.stderr)
        return 1
    print(f"The book is built. Open {PAGE.resolve().as_uri()}, or run `make serve`.")
    return 0


if __name__ == "__main__":
    sys.exit(build())
