"""The observatory: its file, what is told of changes, and the page that is made of it."""

import copy
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("jupyter_book", reason="the book is not built on this stack")
import stacks
from test_build import Book

from shardwise_book import observatory

_COMMAND = Path(__file__).parents[1] / "benchmarks/observatory.py"
_SPEC = importlib.util.spec_from_file_location("observatory_command", _COMMAND)
command = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(command)

PROGRAM = {
    "seconds": 12.3,
    "hbm": 40_000_000,
    "temporaries": 30_000_000,
    "sent": 2_000_000,
    "covered": 0.5,
    "collectives": {
        "all-gather": {"in_program": 2, "run": 6, "asynchronous": 6, "sent": 2_000_000},
    },
}


def entry(jax, **programs):
    versions = {"jax": jax, "jaxlib": jax, "libtpu": f"0.0.{jax[2:4].strip('.')}", "flax": "0.12.8"}
    return {"date": "2026-01-02", "chips": "v5e:2x4", "versions": versions, "programs": programs}


def changed(**fields):
    return copy.deepcopy(PROGRAM) | fields


def written(folder, *entries):
    path = folder / "observatory.json"
    path.write_text(json.dumps({"stacks": entries}))
    return path


def test_releases_are_read_in_their_order_and_once(tmp_path):
    found = observatory.read(written(tmp_path, entry("0.10.1"), entry("0.7.2"), entry("0.9.2")))
    assert [stack.jax for stack in found] == ["0.7.2", "0.9.2", "0.10.1"]
    with pytest.raises(ValueError, match=r"two entries are of JAX 0\.7\.2; run `make observe`"):
        observatory.read(written(tmp_path, entry("0.7.2"), entry("0.7.2")))
    for text in ("{}", "[", '{"stacks": [{"date": "today"}]}'):
        (tmp_path / "observatory.json").write_text(text)
        with pytest.raises(ValueError, match="run `make observe`"):
            observatory.read(tmp_path / "observatory.json")


def told(old, new):
    before, after = (
        observatory.Stack(**entry(jax, ring=program))
        for jax, program in (("0.7.2", old), ("0.9.2", new))
    )
    return observatory.changes(before, after)


def test_what_changed_is_told_in_numbers_and_what_did_not_is_not():
    assert told(PROGRAM, PROGRAM) == []
    assert told(PROGRAM, changed(seconds=99.0, sent=2_010_000)) == []  # below one per cent
    assert told(PROGRAM, changed(sent=3_000_000)) == ["ring: sent 2.0 → 3.0 MB."]
    other = {"all-to-all": {"in_program": 1, "run": 1, "asynchronous": 0, "sent": 2_000_000}}
    assert told(PROGRAM, changed(collectives=other, hbm=50_000_000)) == [
        "ring: all-gather 2 → 0, all-to-all 0 → 1, HBM 40.0 → 50.0 MB."
    ]
    assert told(changed(hbm=None), PROGRAM) == []  # an old compiler does not say
    assert told({"failed": "no"}, PROGRAM) == ["ring: compiles now."]
    assert told(PROGRAM, {"failed": "no"}) == ["ring: is refused now."]


def test_a_new_entry_takes_the_place_of_one_of_the_same_release(monkeypatch, tmp_path):
    path = written(tmp_path, entry("0.10.1", a=PROGRAM), entry("0.7.2", a=PROGRAM))
    monkeypatch.setattr(command, "PATH", path)
    command.write([entry("0.10.1", b=PROGRAM), entry("0.9.2", b=PROGRAM)])
    found = observatory.read(path)
    assert [(stack.jax, list(stack.programs)) for stack in found] == [
        ("0.7.2", ["a"]), ("0.9.2", ["b"]), ("0.10.1", ["b"])
    ]  # fmt: skip


def test_an_entry_is_what_an_interpreter_printed(monkeypatch, tmp_path):
    versions = entry("0.9.2")["versions"]
    lines = [{"chips": "v5e:2x4", "versions": versions}, {"name": "ring", **PROGRAM}]
    worker = tmp_path / "worker.py"
    worker.write_text(f"print('noise')\nfor line in {list(map(json.dumps, lines))!r}: print(line)")
    monkeypatch.setattr(command, "WORKER", worker)
    found = command.observe(sys.executable)
    assert found["programs"] == {"ring": PROGRAM} and found["versions"] == versions
    worker.write_text("raise SystemExit('there is no libtpu')")
    with pytest.raises(ValueError, match="no programs were compiled: there is no libtpu"):
        command.observe(sys.executable)


def test_interpreters_that_are_named_are_the_only_ones(monkeypatch):
    monkeypatch.setattr(stacks, "environment", lambda name, stack: f"made for {name}")
    assert list(command.interpreters()) == list(stacks.STACKS)
    monkeypatch.setenv("STACKS", "colab")
    assert command.interpreters() == {"colab": "made for colab"}
    monkeypatch.setenv("INTERPRETERS", "newest=/a/python jax0.9=/b/python")
    assert {name: str(path) for name, path in command.interpreters().items()} == {
        "newest": "/a/python", "jax0.9": "/b/python"
    }  # fmt: skip
    monkeypatch.setenv("INTERPRETERS", "oldest=/a/python")
    with pytest.raises(ValueError, match="no stack oldest: there are newest"):
        command.interpreters()


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A miniature with an observatory of two releases."""
    book = Book(tmp_path_factory.mktemp("observatory"))
    book.append("_toc.yml", "- file: observed\n")
    book.write("observed.md", "# Observed\n\n```{observatory}\n```\n")
    both = [entry("0.7.2", ring=PROGRAM), entry("0.9.2", ring=changed(sent=5_500_000))]
    book.write("book/observatory.json", json.dumps({"stacks": both}))
    return book


def page(book):
    return (book.folder / "_build/html/observed.html").read_text()


@pytest.mark.slow
def test_the_page_is_made_of_the_file_and_follows_it(book):
    status, printed, _ = book.build()
    assert status == 0, printed
    text = re.sub("<[^>]+>", "", page(book))
    for said in ("2026-01-02", "v5e:2x4", "From JAX 0.7.2 to 0.9.2", "ring: sent 2.0 → 5.5 MB."):
        assert said in text
    assert re.search(
        r"ring\s+0\.9\.2\s+2 all-gather \(6 runs\)\s+6\s+5\.5\s+30\.0\s+40\.0\s+12", text
    )
    assert page(book).count("<svg") >= 1 and 'role="img" aria-label="Bars' in page(book)

    book.write("book/observatory.json", json.dumps({"stacks": [entry("0.7.2", ring=PROGRAM)]}))
    status, printed, ran = book.build()
    assert status == 0 and ran == [], printed  # nothing is executed for it
    assert "→ 5.5 MB" not in page(book) and "From JAX" not in page(book)

    book.write("book/observatory.json", "{}")
    status, printed, _ = book.build()
    assert status != 0 and "run `make observe`" in printed


def test_what_is_committed_can_be_read():
    found = observatory.read(stacks.ROOT / observatory.FILE)
    assert found and len(observatory.names(found)) >= 6
    for stack in found:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", stack.date) and stack.versions["libtpu"]
    assert len(observatory.drawing(found)) < 100_000
