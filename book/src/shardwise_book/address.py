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

PACKAGES = ("pyproject.toml", "book/pyproject.toml")
CONFIG = re.compile(r'^(repository:\n(?:  .*\n)*?  url: )"(.*)"$', re.M)
PROJECT = re.compile(r'^\[project\.urls\]\nRepository = "(.*)"\n\n', re.M)
BEFORE_TOOLS = re.compile(r"^(?=\[tool\.)", re.M)
CITATION = re.compile(r'^repository-code: "(.*)"\n', re.M)
CELL = re.compile(r'^(REPOSITORY = )"(.*)"(?=  # written by `make repo)', re.M)
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


def places(root: Path) -> dict[str, str | None]:
    """The address found in each file that holds or repeats it: "" where unset, None where lost."""
    root = Path(root)
    found = {"_config.yml": _first(CONFIG, root / "_config.yml", 2)}
    found |= {path: _first(PROJECT, root / path, 1) or "" for path in PACKAGES}
    found["CITATION.cff"] = _first(CITATION, root / "CITATION.cff", 1) or ""
    for source in pairs.chapters(root / "chapters"):
        found[f"chapters/{source.name}"] = _first(CELL, source, 2)
    return found


def write(root: Path, url: str) -> str:
    """Put `url` into every place, and write the chapters' pairs.

    ValueError names a place whose line for it is lost.
    """
    root, url = Path(root), check(url)
    lost = [place for place, found in places(root).items() if found is None]
    if lost:
        raise ValueError(
            f'{", ".join(lost)}: the line for the address is lost: expected `url: ""` under '
            "`repository:` in _config.yml, and the first cell of the other chapters in a chapter."
        )
    _rewrite(root / "_config.yml", CONFIG, rf'\g<1>"{url}"')
    block = f'[project.urls]\nRepository = "{url}"\n\n' if url else ""
    for path in PACKAGES:
        _rewrite(root / path, PROJECT, "")
        _rewrite(root / path, BEFORE_TOOLS, block)
    _rewrite(root / "CITATION.cff", CITATION, "")
    _rewrite(root / "CITATION.cff", re.compile(r"\Z"), f'repository-code: "{url}"\n' if url else "")
    for source in pairs.chapters(root / "chapters"):
        _rewrite(source, CELL, rf'\g<1>"{url}"')
    pairs.sync(root / "chapters")
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


def _first(pattern, path, group):
    match = pattern.search(path.read_text(encoding="utf-8"))
    return match and match.group(group)


def _rewrite(path, pattern, replacement):
    text = path.read_text(encoding="utf-8")
    path.write_text(pattern.sub(replacement, text, count=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
