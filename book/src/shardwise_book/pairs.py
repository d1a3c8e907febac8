"""The .ipynb beside each chapter: made from the .md, always the same bytes, never edited by hand.

`python -m shardwise_book.pairs sync` writes them all, `... check` says which are missing or differ.
"""

import argparse
import hashlib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbformat

REMEDY = "run `make sync`, then commit the .ipynb"


def render(source: Path) -> str:
    """The text of the notebook that belongs to the chapter at `source`, without outputs."""
    notebook = jupytext.read(source, fmt="md:myst")
    seen = {}
    for cell in notebook.cells:
        # From the content, not at random: an edit of one cell changes one id.
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        cell["id"] = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    return jupytext.writes(notebook, fmt="ipynb").rstrip("\n") + "\n"


def problem(source: Path, strict: bool = False) -> str | None:
    """What is wrong with the pair of the chapter at `source`, in one sentence, or None.

    Outputs that an editor left in the .ipynb are no problem, unless `strict`.
    """
    pair = source.with_suffix(".ipynb")
    if not pair.exists():
        return f"{source}: its notebook {pair.name} is missing: {REMEDY}."
    expected = nbformat.reads(render(source), as_version=4)
    try:
        found = nbformat.read(pair, as_version=4)
    except Exception as error:
        return f"{pair}: not a notebook ({type(error).__name__}: {error}): {REMEDY}."
    cells = itertools.zip_longest(expected.cells, found.cells)
    for number, (ours, theirs) in enumerate(cells, start=1):
        if _content(ours) != _content(theirs):
            line = (ours or theirs).source.split("\n")[0]
            return f"{source}: {pair.name} is out of sync at cell {number} ({line!r}): {REMEDY}."
    if strict and pair.read_text(encoding="utf-8") != render(source):
        return f"{source}: {pair.name} holds outputs or metadata of an editor: {REMEDY}."
    return None


def chapters(folder: Path) -> list[Path]:
    """The chapters in `folder`, as paths of their .md files, sorted."""
    return sorted(Path(folder).glob("*.md"))


def strays(folder: Path) -> list[str]:
    """A sentence for each .ipynb in `folder` that no .md stands beside."""
    return [
        f"{path}: no {path.with_suffix('.md').name} beside it: write that one, or delete this one."
        for path in sorted(Path(folder).glob("*.ipynb"))
        if not path.with_suffix(".md").exists()
    ]


def sync(folder: Path) -> list[Path]:
    """Write the pair of each chapter in `folder`; returns the paths of those that changed."""
    changed = []
    for source in chapters(folder):
        pair, text = source.with_suffix(".ipynb"), render(source)
        if not pair.exists() or pair.read_text(encoding="utf-8") != text:
            pair.write_text(text, encoding="utf-8")
            changed.append(pair)
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status is 1 where `check` finds a problem."""
    parser = argparse.ArgumentParser(prog="python -m shardwise_book.pairs", description=__doc__)
    parser.add_argument("action", choices=["sync", "check"])
    folder = Path("chapters")
    if parser.parse_args(arguments).action == "sync":
        changed = sync(folder)
        print("\n".join(f"wrote {path}" for path in changed) or "All pairs were in sync.")
        return 0
    found = [problem(source, strict=True) for source in chapters(folder)]
    problems = [*filter(None, found), *strays(folder)]
    print("\n".join(problems) or "All pairs are in sync.")
    return 1 if problems else 0


def _content(cell):
    """What of a cell is the chapter's; in its metadata, editors leave theirs."""
    editors = {"execution", "collapsed", "scrolled", "outputId", "id", "ExecuteTime", "trusted"}
    ours = cell and {key: value for key, value in cell.metadata.items() if key not in editors}
    return cell and (cell.cell_type, cell.source, ours)


if __name__ == "__main__":
    sys.exit(main())
