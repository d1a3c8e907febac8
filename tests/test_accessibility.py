"""What the extension mends for screen readers, and axe-core, which test_site.py asks of pages."""

import functools
from importlib.resources import files

import pytest
from browser import PHONE, silent_page

pytest.importorskip("playwright.sync_api", reason="pip install playwright")
pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python")
pytest.importorskip("jupyter_book", reason="the book is not built on this stack")
from shardwise_book import accessible

STILL = "* { transition: none !important; animation: none !important; }"
RUN = """async () => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"], preload: false });
  return violations.flatMap(({ id, help, nodes }) =>
    nodes.map(({ html, failureSummary }) => `${id}: ${help}\\n  ${html.slice(0, 200)}\\n  ` +
      failureSummary.replaceAll("\\n", "\\n  ")));
}"""


@functools.cache
def axe():
    return files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")


def violations(page):
    """What axe-core finds on the page, a text for each place."""
    page.evaluate(axe())
    return page.evaluate(RUN)


def test_axe_finds_what_is_wrong(browser):
    """A run that finds nothing because nothing ran would be green too."""
    with silent_page(browser, viewport=PHONE) as page:
        page.set_content("<p style='color: #aaa; background: #fff'>pale</p><img src='data:,'>")
        found = "\n".join(violations(page))
        assert "color-contrast: " in found and "image-alt: " in found


def test_mends():
    white = "color: #ffffff; text-decoration-color: #ffffff; background-color"
    for written, mended in {
        '<summary aria-label="Toggle hidden content">': "<summary>",
        '<div class="citation" role="doc-biblioentry">': '<div class="citation" role="listitem">',
        '<th class="head"></th>': '<td class="head"></td>',
        '<th class="head"><p></p></th><th>a</th>': '<td class="head"></td><th>a</th>',
        "<thead><tr></tr></thead>": "<thead><tr></tr></thead>",
        f'<span style="{white}: #de9ed6">': '<span style="color: #000000; '
        'background-color: #de9ed6">',
        f'<span style="{white}: #393b79">': '<span style="color: #ffffff; '
        'background-color: #393b79">',
    }.items():
        assert accessible.mend(written) == mended
