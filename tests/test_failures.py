"""The failure gallery: what chapters mark, what of it the page shows, what stops the build."""

import html
import re

import pytest
from browser import SITE_SCRIPTS, silent_page

pytest.importorskip("jupyter_book", reason="the book is not built on this stack")
import nbformat
from test_build import CHAPTER, Book

from shardwise_book import failures, pairs

MARKED = """---
failure: {symptom: "The answer to `%s` is 42.", cause: "Six & seven: multiply < add."}
---
answer = 6 * 7"""
RAISING = """---
failure: {symptom: "Nothing is divided.", cause: "By zero."}
tags: [raises-exception]
---
answer = 6 / 0"""


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A miniature with a gallery."""
    book = Book(tmp_path_factory.mktemp("gallery"))
    book.append("_toc.yml", "- file: failures\n")
    book.write("failures.md", "# Failures\n\n```{failure-gallery}\n```\n")
    return book


def gallery(book):
    """The entries as text: (symptom, output, cause, address and words of the link)."""
    page = (book.folder / "_build/html/failures.html").read_text()
    found = []
    for entry in page.split('<div class="failure docutils container">')[1:]:
        texts = [
            re.search(f'<p class="{name}">(.*?)</p>', entry)[1] for name in ("symptom", "cause")
        ]
        output = re.search(r"<pre>(.*?)</pre>", entry, re.S)[1]
        link = re.search(r'<p class="where"><a [^>]*href="([^"]*)">(.*?)</a>', entry).groups()
        plain = [html.unescape(re.sub("<[^>]*>", "", text)).strip() for text in (*texts, output)]
        found.append((*plain, *link))
    return found


@pytest.mark.slow
def test_the_life_of_a_gallery(book):
    status, printed, _ = book.build()
    assert status == 0, printed
    page = (book.folder / "_build/html/failures.html").read_text()
    assert gallery(book) == [] and "No chapter has marked a failure yet." in page

    book.edit("second", "answer = 6 * 7", MARKED % "it")
    book.edit("second", "More prose.", "## The `second` part\n\nMore prose.")
    book.edit("first", "answer = 6 * 7", RAISING)
    book.edit("first", 'print("the answer to first is", answer)', "")
    status, printed, _ = book.build()
    assert status == 0, printed
    assert "ZeroDivisionError" in book.page("first")
    assert gallery(book) == [
        (
            "Nothing is divided.",
            "By zero.",
            "ZeroDivisionError: division by zero",
            "chapters/first.html#first",
            "First",
        ),
        (
            "The answer to it is 42.",
            "Six & seven: multiply < add.",
            "the answer to second is 42",
            "chapters/second.html#the-second-part",
            "Second: The second part",
        ),
    ]

    book.edit("second", "answer = 6 * 7", "answer = 6 * 9")
    status, printed, executed = book.build()
    assert (status, executed) == (0, ["second"]), printed
    assert [entry[2] for entry in gallery(book)][1] == "the answer to second is 54"

    book.edit("second", "print(", "_ = (")
    status, printed, _ = book.build()
    assert status != 0
    assert re.search(
        r"chapters/second\.md: cell 2 \(line \d+\) `answer = 6 \* 9`: it is marked as a failure, "
        "and prints nothing",
        printed,
    )


def notebook(failure):
    cells = [nbformat.v4.new_markdown_cell("# Title"), nbformat.v4.new_code_cell("x = 1")]
    cells[1].metadata["failure"] = failure
    return nbformat.v4.new_notebook(cells=cells)


@pytest.mark.parametrize(
    "given, mistake",
    [
        ("wrong", "is 'wrong': expected symptom and cause"),
        ({"symptom": "It is."}, "lacks its cause"),
        ({"symptom": "It is.", "cause": " "}, "lacks its cause"),
        ({"symptom": 3, "cause": "So."}, "lacks its symptom"),
        ({"symptom": "It is.", "cause": "So.", "remedy": "This."}, "has 'remedy': expected"),
        ({"symptom": "It <b>is</b>.", "cause": "So."}, "has HTML in its symptom, '<b>'"),
    ],
)
def test_mistakes_of_form(given, mistake):
    (found,) = failures.problems("a.md", notebook(given))
    assert found.startswith(f"a.md: cell 1 `x = 1`: its `failure` {mistake}")


def test_comparisons_are_no_html():
    assert failures.problems("a.md", notebook({"symptom": "a < b > c", "cause": "1 <2"})) == []


def printed(*outputs):
    given = notebook({"symptom": "It is.", "cause": "So."})
    (failure,), silent = failures.collect("a.md", given, [outputs])
    assert bool(silent) != bool(failure.output)
    return failure.output


def test_what_was_printed_is_trimmed():
    def stream(text):
        return nbformat.v4.new_output("stream", text=text)

    assert printed(stream("\n\x1b[31mred\x1b[0m \n\n"), stream("more\n")) == "red\nmore"
    remark = nbformat.v4.new_output("stream", name="stderr", text="a remark")
    assert printed(remark) == "" and printed(remark, stream("more")) == "more"
    lines = printed(stream("\n".join(map(str, range(100))))).split("\n")
    assert lines == [*"01234567", "…", "97", "98", "99"]
    assert len(printed(stream("x" * 1000))) == failures.WIDTH + 2
    shown = nbformat.v4.new_output("display_data", {"text/plain": "8", "text/html": "<b>8</b>"})
    assert printed(shown) == "" and printed() == ""
    assert printed(nbformat.v4.new_output("execute_result", {"text/plain": "8"})) == "8"
    error = nbformat.v4.new_output("error", ename="ValueError", evalue="no\nway", traceback=["…"])
    assert printed(error) == "ValueError: no\nway"


def test_the_pair_keeps_what_a_cell_says(tmp_path):
    path = tmp_path / "marked.md"
    path.write_text(CHAPTER.format(name="x", title="X").replace("answer = 6 * 7", RAISING))
    pair = nbformat.reads(pairs.render(path), as_version=4)
    marked = [cell.metadata["failure"] for cell in pair.cells if "failure" in cell.metadata]
    assert marked == [{"symptom": "Nothing is divided.", "cause": "By zero."}]


GALLERY = """<main><div class="failures">
<div class="failure"><p>Out of memory.</p><pre>RESOURCE_EXHAUSTED: needed 8,192 bytes</pre></div>
<div class="failure"><p>It hangs.</p><pre>device 3 waits for block 7 of layer_2</pre></div>
<div class="failure"><p>A wrong mean.</p><pre>0.358 for 0.621</pre></div></div></main>
<nav id="contents"></nav><a class="menu" href="#"></a>"""


def test_failures_can_be_found(browser, tmp_path):
    (tmp_path / "page.html").write_text(f"<!doctype html>{GALLERY}{SITE_SCRIPTS}")
    with silent_page(browser) as page:
        page.goto((tmp_path / "page.html").as_uri())
        field, status = page.get_by_role("searchbox"), page.get_by_role("status")
        shown = page.locator("div.failure:visible p")
        for text, found, said in [
            ("", ["Out of memory.", "It hangs.", "A wrong mean."], "3 failures"),
            ("WAITS device", ["It hangs."], "1 of 3 failures have these words"),
            ("RESOURCE_EXHAUSTED: needed 4,096 bytes", ["Out of memory."], "most of these words"),
            ("xylophone", [], "No failure has these words."),
            ("constructor (a.b)", [], "No failure"),
        ]:
            field.fill(text)
            assert shown.all_inner_texts() == found, text
            assert said in status.inner_text()
