"""The build, on a miniature book of two tiny chapters: what stops it, what is executed again."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jupyter_book", reason="the book is not built on this stack")
from shardwise_book import pairs

ROOT = Path(__file__).parent.parent
CHAPTER = """\
---
jupytext:
  formats: ipynb,md:myst
  text_representation:
    extension: .md
    format_name: myst
    format_version: 0.13
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

# {title}

Prose.

```{{code-cell}}
import os, pathlib
with pathlib.Path(os.environ["MINIATURE_LOG"]).open("a") as log:
    log.write("{name}\\n")
```

More prose.

```{{code-cell}}
answer = 6 * 7
print("the answer to {name} is", answer)
```
"""


class Book:
    """A book in `folder` with chapters `first` and `second`, under the project's own settings."""

    def __init__(self, folder):
        self.folder, self.log = folder, folder / "log"
        for part in ["_config.yml", "book/_ext", "book/_static", "book/_templates"]:
            copy(ROOT / part, folder / part)
        self.write("_toc.yml", "format: jb-book\nroot: intro\nchapters:\n- file: chapters/first\n")
        self.append("_toc.yml", "- file: chapters/second\n- file: times\n")
        self.write("intro.md", "# A miniature\n")
        self.write("times.md", "# Times\n\n```{run-times}\n```\n")
        self.write("book/references.bib", "")
        self.write("src/mini.py", "VALUE = 1\n")
        for name in ["first", "second"]:
            self.write(f"chapters/{name}.md", CHAPTER.format(name=name, title=name.title()))
        pairs.sync(folder / "chapters")

    def write(self, path, text):
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def append(self, path, text):
        self.write(path, (self.folder / path).read_text() + text)

    def edit(self, name, old, new, sync=True):
        """Replace `old` in a chapter, and write its pair unless told not to."""
        path = self.folder / "chapters" / f"{name}.md"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        if sync:
            pairs.sync(path.parent)

    def build(self):
        """(exit status, what was printed, the chapters that were executed)."""
        self.log.write_text("")
        extension = os.pathsep.join(["book/_ext", os.environ.get("PYTHONPATH", "")])
        ran = subprocess.run(
            [sys.executable, "-m", "shardwise_book"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": extension, "MINIATURE_LOG": str(self.log)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        printed = re.sub(r"\x1b\[[0-9;]*m", "", ran.stdout)
        return ran.returncode, printed, sorted(self.log.read_text().split())

    def page(self, name):
        return (self.folder / "_build/html/chapters" / f"{name}.html").read_text()


def copy(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A miniature that was built once, and what its first build said."""
    book = Book(tmp_path_factory.mktemp("miniature"))
    return book, book.build()


@pytest.fixture
def book(built, tmp_path):
    """A copy of the built miniature, to break."""
    copy_of = object.__new__(Book)
    shutil.copytree(built[0].folder, tmp_path / "book")
    copy_of.folder, copy_of.log = tmp_path / "book", tmp_path / "book/log"
    return copy_of


def test_first_build_executes_all_and_reports(built):
    book, (status, printed, executed) = built
    assert status == 0, printed
    assert executed == ["first", "second"]
    assert "chapters/first.md: runs" in printed
    assert re.search(r"chapters/second\.md: done in \d+\.\d s", printed)
    table = printed[printed.index("Run times") :]
    assert re.search(r"chapters/first +\d+\.\d s\n", table)
    assert re.search(r"all +\d+\.\d s", table)
    for name in executed:
        assert f"the answer to {name} is 42" in book.page(name)
        assert re.search(r'<p class="run-time">Executed in \d+\.\d s', book.page(name))
    times = (book.folder / "_build/html/times.html").read_text()
    assert "chapters/first.html" in times and "Python" in times


def test_edit_of_one_chapter_executes_that_one(book):
    book.edit("second", "6 * 7", "6 * 9")
    status, printed, executed = book.build()
    assert (status, executed) == (0, ["second"]), printed
    assert "the answer to second is 54" in book.page("second")
    assert "the answer to first is 42" in book.page("first")


def test_edit_of_prose_executes_nothing(book):
    book.edit("second", "More prose.", "Better prose.")
    status, printed, executed = book.build()
    assert (status, executed) == (0, []), printed
    assert "Better prose." in book.page("second")
    assert "the answer to second is 42" in book.page("second")


def test_edit_in_src_executes_everything(book):
    book.write("src/mini.py", "VALUE = 2\n")
    status, printed, executed = book.build()
    assert (status, executed) == (0, ["first", "second"]), printed


def test_failing_cells_of_all_chapters_are_named(book):
    book.edit("first", "answer = 6 * 7", "answer = 6 / 0")
    book.edit("second", "answer = 6 * 7", "assert 6 == 7, 'six is not seven'")
    status, printed, _ = book.build()
    assert status != 0
    assert "chapters/first.md: cell 2 (line 27) `answer = 6 / 0` failed" in printed
    short = printed[printed.index("In short:") :]
    assert "`answer = 6 / 0` failed: ZeroDivisionError: division by zero\n" in short
    assert "chapters/second.md: cell 2" in printed
    assert "AssertionError: six is not seven" in printed
    status, again, _ = book.build()
    assert status != 0 and "chapters/first.md: cell 2" in again


@pytest.mark.slow
def test_cell_that_promises_an_error_and_raises_none(book):
    book.edit("first", "answer = 6 * 7", ":tags: [raises-exception]\nanswer = 6 * 7")
    status, printed, _ = book.build()
    assert status != 0
    assert "chapters/first.md: cell 2" in printed
    assert "is tagged raises-exception, and raised nothing" in printed


@pytest.mark.slow
def test_error_that_a_cell_promises_is_shown(book):
    book.edit("first", "answer = 6 * 7", ":tags: [raises-exception]\nanswer = 6 / 0")
    book.edit("first", 'print("the answer to first is", answer)', "")
    status, printed, _ = book.build()
    assert status == 0, printed
    assert "ZeroDivisionError" in book.page("first")


def test_dangling_reference_is_an_error_each_time(book):
    book.edit("second", "More prose.", "See [](nowhere.md) and {ref}`no-such-place`.")
    for _ in range(2):  # a page that is up to date repeats no warning: it must be read again
        status, printed, _ = book.build()
        assert status != 0
        assert re.search(r"chapters/second\.md:\d+: WARNING:.*nowhere", printed)
        assert "no-such-place" in printed


def test_sphinx_warning_is_an_error(book):
    book.edit("first", "More prose.", "```{no-such-directive}\n```")
    status, printed, _ = book.build()
    assert status != 0
    assert re.search(r"chapters/first\.md:\d+: WARNING: Unknown directive", printed)


def test_missing_pair(book):
    (book.folder / "chapters/second.ipynb").unlink()
    status, printed, executed = book.build()
    assert status != 0 and executed == []
    assert "chapters/second.md: its notebook second.ipynb is missing: run `make sync`" in printed


def test_pair_out_of_sync(book):
    book.edit("first", "answer = 6 * 7", "answer = 6 * 8", sync=False)
    status, printed, executed = book.build()
    assert status != 0 and executed == []
    assert "chapters/first.md: first.ipynb is out of sync at cell 4 ('answer = 6 * 8')" in printed
    assert "run `make sync`" in printed


def test_chapter_that_would_not_be_executed(book):
    book.write("chapters/second.md", "# Second\n\nNo front matter.\n")
    status, printed, _ = book.build()
    assert status != 0
    assert "chapters/second.md: would not be executed" in printed
