"""The address of the repository that notebooks install from: `_config.yml` holds it, others repeat.

`python -m shardwise_book.address URL` writes it wherever it stands; an empty URL unsets it. Without
an argument it takes the environment variable URL, as `make repo` gives it.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from . import pairs

# How a file holds the address, and what is written around one. Where the line may be missing, the
# place for it is found.
KEPT = r'\g<before>"{url}"'
CONFIG = r'^(?P<before>repository:\n(?:  .*\n)*?  url: )"(?P<url>.*)"$', KEPT
CELL = r'^(?P<before>REPOSITORY = )"(?P<url>.*)"(?=  # written by `make repo)', KEPT
PROJECT = r'(^\[project\.urls\]\nRepository = "(?P<url>.*)"\n\n)?^(?=\[tool\.)'
PROJECT = PROJECT, '[project.urls]\nRepository = "{url}"\n\n'
CITATION = r'(^repository-code: "(?P<url>.*)"\n)?\Z', 'repository-code: "{url}"\n'
FILES = {"_config.yml": CONFIG, "CITATION.cff": CITATION}
FILES |= {"pyproject.toml": PROJECT, "book/pyproject.toml": PROJECT}
LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"  # of a host's name
PART = r"/(?!\.\.?(/|$))(?=[^/]*[a-z0-9])[\w.~-]+"  # of a path: no step up, and no mere punctuation
ADDRESS = re.compile(
    rf"https://{LABEL}(\.{LABEL})*(:\d{{1,5}})?({PART}){{2,}}|file://({PART})+", re.A | re.I
)


def check(url: str) -> str:
    """`url` without a closing slash or .git; ValueError where it is no address of a repository."""
    plain = url.strip().removesuffix("/").removesuffix(".git")
    if plain and not ADDRESS.fullmatch(plain):
        raise ValueError(
            f"URL={url!r} is no address of a repository: expected https://host/owner/name, as in "
            "`make repo URL=https://github.com/owner/name`, or nothing, to unset it."
        )
    return plain


def _forms(root):
    """{path: its form} of all files that hold the address."""
    chapters = pairs.chapters(Path(root, "chapters"))
    return FILES | {f"chapters/{source.name}": CELL for source in chapters}


def places(root: Path) -> dict[str, str | None]:
    """The address found in each file that holds or repeats it: "" where unset, None where lost."""
    found = {}
    for path, (pattern, _) in _forms(root).items():
        match = re.search(pattern, Path(root, path).read_text(encoding="utf-8"), re.M)
        found[path] = match and (match["url"] or "")
    return found


def write(root: Path, url: str) -> str:
    """Put `url` into every place, and write the chapters' pairs.

    ValueError names a place whose line for it is lost.
    """
    url = check(url)
    lost = [place for place, found in places(root).items() if found is None]
    if lost:
        raise ValueError(
            f'{", ".join(lost)}: the line for the address is lost: expected `url: ""` under '
            "`repository:` in _config.yml, and the first cell of the other chapters in a chapter."
        )
    for path, (pattern, form) in _forms(root).items():
        text = Path(root, path).read_text(encoding="utf-8")
        line = form.replace("{url}", url) if url or form is KEPT else ""
        text = re.sub(pattern, line, text, count=1, flags=re.M)
        Path(root, path).write_text(text, encoding="utf-8")
    pairs.sync(Path(root, "chapters"))
    return url


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="make repo URL=...", description=__doc__)
    parser.add_argument("url", nargs="?", default=os.environ.get("URL", ""))
    parser.add_argument("--root", type=Path, default=Path("."))
    options = parser.parse_args(arguments)
    try:
        url = write(options.root, options.url)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Notebooks install from {url}." if url else "No address: no launch buttons.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
