"""What the extension does to pages: formulas, docstrings, and the links above each chapter."""

import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest
from browser import serve, silent_page

pytest.importorskip("jupyter_book", reason="the book is not built on this stack")
from shardwise_book import figures, site
from shardwise_book.reference import to_rst
from shardwise_book.site import draw, lift, page_links

ROOT = Path(__file__).parent.parent
CHAPTERS = [f"chapters/{path.stem}" for path in sorted((ROOT / "chapters").glob("*.md"))]
COLAB = "https://colab.research.google.com"


@pytest.mark.parametrize(
    "tex, mistake",
    [
        (r"\foo x", r"'\\foo' would be shown as it stands"),
        ("x^2^3", "DoubleSuperscripts"),
        (r"\frac{a", "its braces do not match"),
        (r"\begin{split} a & b", "check its commands"),
        ("a & b", "'&' would be shown"),
        (r"\left\{ \frac{a}{b} \right.", ""),
        (r"\begin{aligned} a &= b \\ &= c \end{aligned}", ""),
        (r"A[I_X, J]\; B[J, K] \to C[I_X, K]\,\{U_Y\}", ""),
    ],
)
def test_mistakes_in_formulas_are_found(tex, mistake):
    drawn, found = draw(tex, "block")
    assert mistake in found and bool(mistake) == bool(found)
    assert found or ElementTree.fromstring(drawn).tag.endswith("math")


def test_docstrings_become_rst():
    text = """One `name` and ``more``.

A batch is a dict of arrays [batch, seq]:
  tokens: int32, the bytes
    to: predict from;
  mask:   1 where `real`.

- one thing,
  with: a colon.

Bind it:

    with bind(use=gather):
        run(`x`)

Raises:
  ValueError: a `size` below 1."""
    assert to_rst(text.split("\n")) == [
        "One ``name`` and ``more``.",
        "",
        "A batch is a dict of arrays [batch, seq]:",
        "",
        "  - ``tokens``: int32, the bytes",
        "    to: predict from;",
        "  - ``mask``: 1 where ``real``.",
        "",
        "- one thing,",
        "  with: a colon.",
        "",
        "Bind it::",
        "",
        "    with bind(use=gather):",
        "        run(`x`)",
        "",
        "Raises:",
        "  ValueError: a ``size`` below 1.",
    ]


def test_values_in_docstrings_become_code():
    """So their quotes stay straight, to be copied."""
    text = """By "hand", of "a b" or "", and ``f("x")`` of `n`×`m` and `p("y")`, not 5" or "z"s."""
    assert to_rst([text]) == [
        """By ``"hand"``, of ``"a b"`` or ``""``, and ``f("x")`` of ``n``\\ ×\\ ``m`` and """
        """``p("y")``, not 5" or "z"s."""
    ]


@pytest.mark.parametrize("name", CHAPTERS)
def test_addresses_of_a_chapter(name):
    """What follows the branch in each link is a file of this repository."""
    links = page_links("https://github.com/owner/name", "main", COLAB, name)
    assert [link["name"] for link in links] == ["Colab", "Source"]
    for link, suffix in zip(links, [".ipynb", ".md"], strict=True):
        path = link["url"].partition("/owner/name/blob/main/")[2]
        assert path == name + suffix and (ROOT / path).exists()
    elsewhere = page_links("https://example.org/owner/name", "main", COLAB, name)
    assert [link["name"] for link in elsewhere] == ["Source"]
    assert page_links("", "main", COLAB, name) == []


def test_every_declaration_of_the_style_sheet_is_one(browser):
    """A browser drops without a word what it does not know."""
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "book/_static/shardwise.css").read_text(), flags=re.S)
    blocks = re.findall(r"\{([^{}]*)\}", text)
    lines = [line for block in blocks for line in block.split(";") if line.strip()]
    declared = [line.replace("!important", "").strip().split(":", 1) for line in lines]
    assert len(declared) > 300
    with silent_page(browser) as page:
        unknown = "pairs => pairs.filter(([name, value]) => !CSS.supports(name, value.trim()))"
        assert page.evaluate(unknown, declared) == []


def test_no_colour_of_code_is_left_out():
    """Spans that pages leave out to weigh less are those that the style sheet has no rule for."""
    rules = re.findall(r"\.highlight ([^{]*)\{", (ROOT / "book/_static/shardwise.css").read_text())
    coloured = set(re.findall(r"\.([a-z][a-z0-9]?)\b", " ".join(rules)))
    assert {"k", "s1", "nf", "c1"} <= coloured
    assert coloured.isdisjoint(site.UNCOLOURED)
    code = '<span class="n">x</span> <span class="o">=</span> <span class="mi">1</span>'
    assert site.PLAIN.sub(r"\1", code) == 'x = <span class="mi">1</span>'


@pytest.fixture(scope="module")
def addressed(tmp_path_factory):
    """A function that builds the book of two tiny chapters with an address set."""
    from test_build import Book

    book, built = Book(tmp_path_factory.mktemp("miniature")), []
    settings = (book.folder / "_config.yml").read_text()

    def build(address, intro="# A miniature\n"):
        if built != [address, intro]:
            url = re.sub(r'(?m)^  url: ".*"', f'  url: "{address}"', settings)
            book.write("_config.yml", url)
            book.write("intro.md", intro)
            status, printed, _ = book.build()
            assert status == 0, printed
            built[:] = address, intro
        return book.folder

    return build


AFAR = "https://github.com/owner/name", "# A miniature\n\nThe constructor of `__proto__`.\n"


def test_buttons_lead_to_existing_files(browser, addressed):
    """Each button is pressed; the repository's folder answers for GitHub and for Colab."""
    folder = addressed(*AFAR)
    context, asked = browser.new_context(), []

    def answer(route):
        asked.append(urlsplit(route.request.url).hostname)
        path = folder / route.request.url.partition("/owner/name/blob/main/")[2]
        found = path.is_file()
        text = path.read_text() if found else "no such file"
        route.fulfill(status=200 if found else 404, content_type="text/plain", body=text)

    context.route(re.compile("^https://"), answer)
    page = context.new_page()
    with serve(folder / "_build/html") as site:  # from a file, browsers show instead of saving
        for name in ["first", "second"]:
            for button, suffix in [("Colab", ".ipynb"), ("Source", ".md")]:
                page.goto(f"{site}/chapters/{name}.html")
                with page.expect_navigation() as arrival:
                    page.locator(".tools").get_by_role("link", name=button).click()
                assert arrival.value.status == 200
                assert arrival.value.text() == (folder / f"chapters/{name}{suffix}").read_text()
            page.goto(f"{site}/chapters/{name}.html")
            with page.expect_download() as download:
                page.locator(".tools a[download]").click()
            notebook = folder / f"chapters/{name}.ipynb"
            assert Path(download.value.path()).read_bytes() == notebook.read_bytes()
    assert asked == ["colab.research.google.com", "github.com"] * 2
    context.close()


def test_search_finds_a_word_that_every_object_has_where_it_stands(browser, addressed):
    folder = addressed(*AFAR)
    with serve(folder / "_build/html") as site, silent_page(browser) as page:
        page.goto(f"{site}/search.html?q=constructor")
        page.wait_for_selector("#search-results li a")
        assert page.locator("#search-results li a").all_inner_texts() == ["A miniature"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / "clone"


def test_local_address_leads_to_existing_files(browser, addressed, clone):
    folder = addressed(clone.as_uri())
    with silent_page(browser) as page:
        page.goto((folder / "_build/html/chapters/first.html").as_uri())
        links = [link.get_attribute("href") for link in page.locator(".tools a").all()]
        assert page.locator(".tools a").all_inner_texts() == ["Notebook", "Source"]
        assert links[1] == f"{clone.as_uri()}/chapters/first.md"
        shutil.copytree(folder / "chapters", clone / "chapters")
        assert "# First" in page.goto(links[1]).text()


def test_search_ends_on_such_words(browser, addressed, clone):
    folder = addressed(clone.as_uri())
    with serve(folder / "_build/html") as site, silent_page(browser) as page:
        for query in ["constructor", "__proto__", "toString valueOf", "hasOwnProperty"]:
            page.goto(f"{site}/search.html?q={query}")
            page.wait_for_selector("#search-results h2:text('Search Results')")
            assert "did not match any" in page.locator("#search-results").inner_text(), query
        page.goto(f"{site}/search.html?q=prose+miniature")
        page.wait_for_selector("#search-results li a")


def test_figures_share_their_scripts_and_styles(browser, tmp_path):
    """Three questions' blocks on a page: one copy of what they share, in files; all work."""
    block = figures.questions(figures.fill_in("How many?", 8, why="Eight."))
    inline = "".join(block._repr_html_() for _ in range(3))
    (tmp_path / "chapters").mkdir()
    text = lift(f"<p>before</p>{inline}", tmp_path, "../_static/figures")
    assert len(text) < len(inline) / 3 and "<style>" not in text
    assert text.count("<script src=") == text.count("<link") == 1
    page = f'<!doctype html><meta charset="utf-8"><title>x</title>{text}'
    (tmp_path / "chapters/page.html").write_text(page, encoding="utf-8")
    with silent_page(browser) as page:
        page.goto((tmp_path / "chapters/page.html").as_uri())
        for field, told in zip(
            page.get_by_role("textbox").all(), page.get_by_role("status").all(), strict=True
        ):
            field.fill("8")
            field.press("Enter")
            assert told.inner_text() == "Right. Eight."
    assert lift("<p>none</p>", tmp_path, "") == "<p>none</p>"
