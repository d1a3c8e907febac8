"""Fixtures: a browser, the built site from files and from a server, and a page that must be silent.

`page` fails its test when the page asked for anything outside, or wrote anything to the console.
A test that needs the browser or the site is slow: `make test` does without both.
"""

import contextlib
import functools
import http.server
import os
import re
import shutil
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

SITE = Path(__file__).parent.parent / "_build" / "html"
STATIC = Path(__file__).parent.parent / "book" / "_static"
SITE_SCRIPTS = f"<script>{(STATIC / 'shardwise.js').read_text(encoding='utf-8')}</script>"
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` names
def pytest_collection_modifyitems(items):
    for item in items:
        if not {"browser", "site"}.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("slow")


def missing(what):
    """Without a part of the machinery tests skip, and in CI fail."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(what)


@pytest.fixture(scope="session")
def site():
    if not (SITE / "index.html").exists():
        missing("There is no site in _build/html: run `make book` first.")
    return SITE


@contextlib.contextmanager
def serve(folder):
    """The address at which `folder` is served on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def server(site):
    with serve(site) as address:
        yield address


def launch(playwright):
    """Headless Chromium, from the PATH or Playwright's own."""
    error_class = pytest.importorskip("playwright.sync_api").Error
    found = next(filter(None, map(shutil.which, NAMES)), None)
    try:
        return playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-gpu"]
        )
    except error_class as error:
        how = "No browser: install chromium, or run `playwright install chromium`."
        missing(f"{how} ({error.message[:80]})")


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with sync_api.sync_playwright() as playwright:
        chromium = launch(playwright)
        yield chromium
        chromium.close()


def expect(locator):
    """Playwright's assertions of it, which wait."""
    expect = pytest.importorskip("playwright.sync_api").expect
    expect.set_options(timeout=30_000)
    return expect(locator)


def write_page(folder, *figures):
    """A file that holds nothing but these interactive figures, as its address."""
    head = (
        '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    )
    shown = "".join(figure._repr_html_() for figure in figures)
    (folder / "page.html").write_text(f"{head}<title>Test</title>{shown}", encoding="utf-8")
    return (folder / "page.html").as_uri()


# A name that a caller may give: text, though it looks like HTML, an id of ours and a prototype.
NAME = """<img src="x" onerror="document.title='ran'"> & it's id="@step" __proto__"""


def check_stands_alone(one, two, limit):
    """Two showings of one figure, as HTML: small, fetching nothing, with ids of their own."""
    assert len(one.encode()) < limit
    assert not re.findall(r"(?:https?:)?//\w[^\s\"'<]*\.\w", one)
    found = [set(re.findall(r'id="([^"]+)"', text)) for text in (one, two)]
    assert len(found[0]) == len(found[1]) and not found[0] & found[1]
    assert {*re.findall(r'for="([^"]+)"', one)} <= found[0]


@contextlib.contextmanager
def silent_page(browser, **settings):
    """A page of its own context; on leaving, asserts that it was silent and stayed at home."""
    context = browser.new_context(**settings)
    page, heard = context.new_page(), []
    page.set_default_timeout(30_000)

    def hear(*what):
        heard.append((page.url, *what))

    def watch(request):
        address = urlsplit(request.url)
        if address.scheme not in ("file", "data") and address.hostname != "127.0.0.1":
            hear("left the site", request.url)

    def fail(request):
        if request.failure != "net::ERR_ABORTED":  # a fetch cut off by leaving the page is no fault
            hear("failed", request.url, request.failure)

    page.on("console", lambda message: hear(message.type, message.text))
    page.on("pageerror", lambda error: hear("error", str(error)))
    page.on("requestfailed", fail)
    page.on("request", watch)
    yield page
    context.close()
    assert heard == []


@pytest.fixture
def page(browser, site):
    """A silent page at 1280 × 900 in light mode; `page.open("chapters/slug")` opens a chapter."""
    with silent_page(browser, viewport=DESKTOP, color_scheme="light") as opened:
        opened.open = lambda name: opened.goto(f"{site.as_uri()}/{name}.html")
        yield opened
