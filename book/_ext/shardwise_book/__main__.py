"""`python -m shardwise_book`: builds the book in this folder, and says where to open it."""

import sys
from pathlib import Path

import click
from jupyter_book.cli.main import main

PAGE = Path("_build/html/index.html")


def build():
    """Run Jupyter Book; its exit status, without the trace of its own code below the message."""
    try:
        main(["build", ".", "--warningiserror", "--keep-going"], standalone_mode=False)
    except (RuntimeError, click.ClickException) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"The book is built. Open {PAGE.resolve().as_uri()}, or run `make serve`.")
    return 0


if __name__ == "__main__":
    sys.exit(build())
