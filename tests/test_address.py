"""The repository's address: one place, its repetitions, and a first cell without one."""

import shutil
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("jupytext", reason="the book is not built on this stack")
from IPython.core.inputtransformer2 import TransformerManager

from shardwise_book import address, pairs

ROOT = Path(__file__).parent.parent
URL = "https://example.org/someone/shardwise"


@pytest.fixture
def project(tmp_path):
    """A copy of all that holds the address."""
    (tmp_path / "book").mkdir()
    for name in ["_config.yml", "pyproject.toml", "book/pyproject.toml", "CITATION.cff"]:
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "chapters").mkdir()
    for source in pairs.chapters(ROOT / "chapters")[:2]:  # all are alike
        for path in source, source.with_suffix(".ipynb"):
            shutil.copy(path, tmp_path / "chapters")
    address.write(tmp_path, "")
    return tmp_path


def test_all_places_agree():
    found = address.places(ROOT)
    assert len(found) > 3, "no chapters found"
    assert set(found.values()) == {found["_config.yml"]}, found


def test_set_and_unset(project):
    before = {path: path.read_text() for path in project.rglob("*") if path.is_file()}
    assert address.main([f"{URL}.git/", "--root", str(project)]) == 0
    assert set(address.places(project).values()) == {URL}
    for source in pairs.chapters(project / "chapters"):
        assert pairs.problem(source, strict=True) is None
        assert f'REPOSITORY = \\"{URL}\\"' in source.with_suffix(".ipynb").read_text()
    address.write(project, "")
    assert {path: path.read_text() for path in before} == before


def test_one_address_takes_the_place_of_another(project):
    for url in URL, "https://example.org/else/where", "":
        address.write(project, url)
        assert set(address.places(project).values()) == {url}


NO_ADDRESSES = [
    "github.com/a/b",
    "http://x.org/a/b",
    "https://x.org",
    "a b",
    "https://-/./.",
    "https://x.org/a/..",
    "https://x.org/-/-",
    "https://x..org/a/b",
    "https://x.org:123456/a/b",
    "file:///a/../b",
    '-x"; touch hacked; "',
]


def test_what_is_no_address_is_refused(project, monkeypatch, capsys):
    for url in NO_ADDRESSES:
        monkeypatch.setenv("URL", url)
        assert address.main(["--root", str(project)]) == 1, url
        message = capsys.readouterr().err
        assert repr(url) in message and "expected https://host/owner/name" in message
        assert set(address.places(project).values()) == {""}, url


@pytest.mark.parametrize(
    "url", ["https://host:8443/a/.github", "https://x-y.org/a/b.c/d~e", "file:///a"]
)
def test_addresses_are_taken_as_they_are(url):
    assert address.check(url) == url


def test_lost_line_is_named(project):
    chapter = pairs.chapters(project / "chapters")[0]
    chapter.write_text(chapter.read_text().replace("REPOSITORY =", "ADDRESS ="))
    with pytest.raises(ValueError, match=chapter.name):
        address.write(project, URL)


def test_first_cells_begin_alike_and_say_that_no_address_is_set(project, monkeypatch):
    cells = {
        next(cell.source for cell in notebook.cells if cell.cell_type == "code").split("\n\nfrom ")[
            0
        ]
        for path in sorted((project / "chapters").glob("*.ipynb"))
        for notebook in [pairs.nbformat.read(path, as_version=4)]
    }
    assert len(cells) == 1, "chapters begin differently"
    cell = TransformerManager().transform_cell(cells.pop())
    exec(cell, {})  # outside of Colab it does nothing
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    with pytest.raises(AssertionError, match=r"No repository address yet: run `make repo URL="):
        exec(cell, {})
