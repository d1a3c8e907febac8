"""The build, on a miniature book of two tiny chapters: what stops it, what is executed again."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("jupyter_book", reason="the book is not built on this stack")
import nbformat
from sampling import IN_FULL

from shardwise_book import execute, pairs

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
log = pathlib.Path(os.environ["MINIATURE_LOG"])
with log.open("a") as file:
    file.write("{name}\\n")
source = log.with_name("src") / "mini.py"
print(source.read_text())
```

More prose.

```{{code-cell}}
answer = 6 * 7
print("the answer to {name} is", answer)
```
"""


# What a test has Sphinx do at one of its events.
MOMENT = """\
import os, pathlib, signal
def act(app, *arguments):
    exec(os.environ["ACTION"], globals(), {"app": app, "arguments": arguments})
def setup(app):
    if "MOMENT" in os.environ:
        app.connect(os.environ["MOMENT"], act, priority=950)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
"""


class Book:
    """A book in `folder` with chapters `first` and `second`, under the project's own settings."""

    def __init__(self, folder):
        self.folder, self.log = folder, folder / "log"
        for part in ["_config.yml", "book/src", "book/_static", "book/_templates"]:
            copy(ROOT / part, folder / part)
        self.write("_toc.yml", "format: jb-book\nroot: intro\nchapters:\n- file: chapters/first\n")
        self.append("_toc.yml", "- file: chapters/second\n- file: times\n")
        self.append("_config.yml", "      - moment\n", after="      - shardwise_book\n")
        self.write("book/src/moment.py", MOMENT)
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

    def append(self, path, text, after=""):
        """Write more at the end of a file, or after the line `after`."""
        old = (self.folder / path).read_text()
        head, line, tail = old.partition(after) if after else (old, "", "")
        self.write(path, head + line + text + tail)

    def edit(self, name, old, new, sync=True):
        """Replace `old` in a chapter, and write its pair unless told not to."""
        path = self.folder / "chapters" / f"{name}.md"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        if sync:
            pairs.sync(path.parent)

    def start(self, **settings):
        """A build that has begun, with `settings` in its environment."""
        self.log.write_text("")
        extension = os.pathsep.join(["book/src", os.environ.get("PYTHONPATH", "")])
        ours = {"PYTHONPATH": extension, "MINIATURE_LOG": str(self.log)}
        return subprocess.Popen(
            [sys.executable, "-m", "shardwise_book"],
            cwd=self.folder,
            env={**os.environ, **ours, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def build(self, **settings):
        """(exit status, what was printed, the chapters that were executed)."""
        started = self.start(**settings)
        printed = re.sub(r"\x1b\[[0-9;]*m", "", started.communicate()[0])
        return started.returncode, printed, sorted(self.log.read_text().split())

    def page(self, name):
        return (self.folder / "_build/html/chapters" / f"{name}.html").read_text()


def copy(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


SLOW = pytest.mark.slow


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


@SLOW
def test_first_build_executes_all_and_reports(built):
    book, (status, printed, executed) = built
    assert status == 0, printed
    assert executed == ["first", "second"]
    assert "chapters/first.md: runs" in printed
    assert re.search(r"chapters/second\.md: done in \d+\.\d s", printed)
    for name in executed:
        assert f"the answer to {name} is 42" in book.page(name)
        assert re.search(r'<p class="run-time">Executed in \d+\.\d s', book.page(name))
    times = (book.folder / "_build/html/times.html").read_text()
    assert "chapters/first.html" in times and "Python" in times


@SLOW
def test_edit_of_cells_executes_that_chapter_and_edit_of_prose_none(book):
    book.edit("second", "6 * 7", "6 * 9")
    book.edit("first", "More prose.", "Better prose.")
    status, printed, executed = book.build()
    assert (status, executed) == (0, ["second"]), printed
    assert "the answer to second is 54" in book.page("second")
    assert "the answer to first is 42" in book.page("first")
    assert "Better prose." in book.page("first")


@SLOW
def test_failing_cells_of_all_chapters_are_named(book):
    book.edit("first", "answer = 6 * 7", "answer = 6 / 0")
    book.edit("second", "answer = 6 * 7", "assert 6 == 7, 'six is not seven'")
    status, printed, _ = book.build()
    assert status != 0
    assert "chapters/first.md: cell 2 (line 30) `answer = 6 / 0` failed" in printed
    short = printed[printed.index("In short:") :]
    assert "`answer = 6 / 0` failed: ZeroDivisionError: division by zero\n" in short
    assert "chapters/second.md: cell 2" in printed
    assert "AssertionError: six is not seven" in printed
    status, again, _ = book.build()
    assert status != 0 and "chapters/first.md: cell 2" in again


def test_cell_that_promises_an_error_and_raises_none():
    cells = [nbformat.v4.new_code_cell(line) for line in ("1 / 0", "6 * 7")]
    for cell in cells:
        cell.metadata["tags"] = ["raises-exception"]
    ran = execute.run(nbformat.v4.new_notebook(cells=cells), "chapters/first.md")
    assert ran.failure.startswith("chapters/first.md: cell 2 `6 * 7`")
    assert "is tagged raises-exception, and raised nothing" in ran.failure
    assert ran.notebook.cells[0].outputs[0].ename == "ZeroDivisionError"


def test_temporary_files_go_with_the_kernel():
    source = """import os, tempfile
print(repr((os.getcwd(), tempfile.mkdtemp(), tempfile.gettempdir()))[::-1])"""
    cells = [nbformat.v4.new_code_cell(source)]
    ran = execute.run(nbformat.v4.new_notebook(cells=cells), "leaving")
    # Backwards, since paths of this machine are taken out of what cells print.
    folders = ast.literal_eval(ran.notebook.cells[0].outputs[0].text.strip()[::-1])
    assert len(folders) == 3 and not any(map(os.path.exists, folders)), folders


@SLOW
def test_warnings_of_all_pages_are_errors_each_time(book):
    book.edit("first", "More prose.", "```{no-such-directive}\n```")
    book.edit("second", "More prose.", "See [](nowhere.md) and {ref}`no-such-place`.")
    book.write("intro.md", "# A miniature\n\nText.\n\n$$\n\\foo + 1\n$$\n")
    for _ in range(2):  # a page that is up to date repeats no warning: it must be read again
        status, printed, _ = book.build()
        assert status != 0
        assert re.search(r"chapters/first\.md:\d+: WARNING: Unknown directive", printed)
        assert re.search(r"chapters/second\.md:\d+: WARNING:.*nowhere", printed)
        assert "no-such-place" in printed
        formula = r"intro\.md:5: WARNING: formula .*foo \+ 1.*would be shown as it"
        assert re.search(formula, printed)


@SLOW
def test_pairs_that_are_missing_or_out_of_sync_are_all_named(book):
    book.edit("first", "answer = 6 * 7", "answer = 6 * 8", sync=False)
    (book.folder / "chapters/second.ipynb").unlink()
    status, printed, executed = book.build()
    assert status != 0 and executed == []
    assert "chapters/first.md: first.ipynb is out of sync at cell 4 ('answer = 6 * 8')" in printed
    assert "chapters/second.md: its notebook second.ipynb is missing: run `make sync`" in printed
    assert printed.count("run `make sync`") == 2


@SLOW
def test_chapter_that_would_not_be_executed(book):
    book.write("chapters/second.md", "# Second\n\nNo front matter.\n")
    status, printed, _ = book.build()
    assert status != 0
    assert "chapters/second.md: would not be executed" in printed
    book.write("chapters/second.md", "")
    assert "chapters/second.md: would not be executed" in book.build()[1]
    (book.folder / "chapters/second.md").unlink()
    assert "chapters/second.md: named in _toc.yml, and not there: write it" in book.build()[1]


@SLOW
def test_a_package_that_is_imported_from_elsewhere_is_named(book):
    """Edits in this folder would change nothing, and nobody would know."""
    elsewhere = os.pathsep.join([str(ROOT / "book/src"), "book/src"])
    status, printed, executed = book.build(PYTHONPATH=elsewhere)
    assert status != 0 and executed == []
    assert "shardwise_book is imported from elsewhere: run `pip install -r" in printed


@SLOW
@pytest.mark.parametrize("name", ["SIGKILL", *(["SIGTERM", "SIGINT"] if IN_FULL else [])])
def test_build_that_is_cut_off_between_two_pages(book, name):
    """What had been written is older than the source, and no file's time tells."""
    book.write("src/mini.py", "VALUE = 2\n")
    action = f'arguments[0] == "chapters/second" and os.kill(os.getpid(), signal.{name})'
    status, printed, executed = book.build(MOMENT="html-page-context", ACTION=action)
    assert status != 0 and executed == ["first", "second"], printed
    assert "VALUE = 2" in book.page("first") and "VALUE = 1" in book.page("second")
    status, printed, executed = book.build()
    assert (status, executed) == (0, []), printed
    assert "VALUE = 2" in book.page("first") and "VALUE = 2" in book.page("second")


@SLOW
def test_source_that_is_edited_while_chapters_run(book):
    """The first result is of two states: it is not stored for the one that the run began with."""
    edited = (
        'if "EDIT" in os.environ:\n    source.write_text("VALUE = 3")\nanswer = source.read_text()'
    )
    book.edit("second", "answer = 6 * 7", edited)
    status, printed, _ = book.build(EDIT="now")
    assert status != 0
    assert "src/mini.py changed while chapters ran: run `make book` again" in printed
    book.write("src/mini.py", "VALUE = 1\n")
    status, printed, executed = book.build()
    assert status == 0 and "second" in executed, printed
    assert "the answer to second is VALUE = 1" in book.page("second")


EDIT = """path = pathlib.Path(app.srcdir, "chapters/second.md")
path.write_text(path.read_text().replace("More prose.", "Better prose."))"""


@SLOW
@pytest.mark.parametrize(
    "moment", ["builder-inited", "env-updated", *(["env-before-read-docs"] if IN_FULL else [])]
)
def test_prose_that_is_edited_while_the_book_is_built(book, moment):
    """Before its page is read, and after: Sphinx itself would not notice."""
    status, printed, executed = book.build(MOMENT=moment, ACTION=EDIT)
    assert status != 0 and executed == []
    assert "chapters/second.md changed while the book was built: run `make book`" in printed
    pairs.sync(book.folder / "chapters")
    status, printed, executed = book.build()
    assert (status, executed) == (0, []), printed
    assert "Better prose." in book.page("second")


@SLOW
def test_another_environment_executes_everything(book):
    setting = {"UNRELATED": "1"}
    for name, value in [
        ("XLA_FLAGS", "--xla_dump_max_hlo_modules=1"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "highest"),
    ]:
        setting[name] = value
        status, printed, executed = book.build(**setting)
        assert (status, executed) == (0, ["first", "second"]), printed
    assert book.build(**setting | {"UNRELATED": "2"})[2] == []


@SLOW
def test_chapter_that_is_removed_is_no_longer_published(book):
    toc = (book.folder / "_toc.yml").read_text()
    book.write("_toc.yml", toc.replace("- file: chapters/second\n", ""))
    for path in (book.folder / "chapters").glob("second.*"):
        path.unlink()
    status, printed, executed = book.build()
    assert (status, executed) == (0, []), printed
    site = book.folder / "_build/html"
    assert not [path for path in site.rglob("*") if "second" in path.name]
    assert not [path for path in site.rglob("*.html") if "Second" in path.read_text()]
    assert "42" in book.page("first") and (site / "_downloads/first.ipynb").exists()
    assert book.build()[0] == 0


@SLOW
def test_edit_of_the_extension_makes_every_page_anew(book):
    assert book.build()[0] == 0  # a book that has moved is made anew in any case
    times = "book/src/shardwise_book/times.py"
    book.write(times, (book.folder / times).read_text().replace("Executed in", "Ran for"))
    status, printed, executed = book.build()
    assert status == 0, printed
    assert executed == []
    for name in ["first", "second"]:
        assert re.search(r'<p class="run-time">Ran for \d', book.page(name))


def cut_short(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(path):
    path.write_text(path.read_text().replace(" is 42", " is 43").replace("second is", "second IS"))


DAMAGES = {
    "a result cut short": cut_short,
    "a result changed": change,
    "a result emptied": lambda path: path.write_bytes(b""),
    "a result missing": Path.unlink,
}


@SLOW
@pytest.mark.parametrize("damages", [("cut short", "changed"), ("emptied", "missing")])
def test_damaged_results_are_executed_again(book, damages):
    """Of two chapters, each in its own way."""
    found = list((book.folder / "_build/.results").glob("*/*/*.json"))
    for path, damage in zip(found, damages, strict=True):
        DAMAGES[f"a result {damage}"](path)
    status, printed, executed = book.build()
    assert (status, executed) == (0, ["first", "second"]), printed
    assert "the answer to second is 42" in book.page("second")


@SLOW
@pytest.mark.parametrize("name", ["SIGINT", *(["SIGTERM"] if IN_FULL else [])])
def test_interrupt_stops_what_runs_and_starts_no_other(book, name):
    """Only the build gets the signal, as from `kill`; kernels would go on for an hour."""
    waiting = "log.with_name('kernel').write_text(str(os.getpid()))\nimport time; time.sleep(3600)"
    for chapter in ["first", "second"]:
        book.edit(chapter, "answer = 6 * 7", waiting)
    started, kernel = book.start(SHARDWISE_JOBS="1"), book.folder / "kernel"
    try:
        until(lambda: kernel.exists() and kernel.read_text())
        started.send_signal(getattr(signal, name))
        printed = started.communicate(timeout=600)[0]
    finally:
        started.kill()
    assert started.returncode != 0, printed
    assert book.log.read_text().split() in (["first"], ["second"])
    until(lambda: not Path("/proc", kernel.read_text()).exists())


def until(condition):
    """Wait for what must come; ten minutes are longer than it takes anywhere."""
    for _ in range(12_000):
        if condition():
            return
        time.sleep(0.05)
    raise TimeoutError


@SLOW
def test_two_builds_at_once_both_end_well(book):
    book.write("src/mini.py", "VALUE = 2\n")
    both = [book.start() for _ in range(2)]
    printed = [one.communicate()[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], printed
    assert "Another build of this book runs: waiting for its end" in "".join(printed)
    assert "VALUE = 2" in book.page("first") and "VALUE = 2" in book.page("second")
