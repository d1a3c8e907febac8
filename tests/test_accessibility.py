"""What the extension mends for screen readers, and axe-core, which test_site.py asks of pages."""

import functools
from importlib.resources import files

import pytest
from browser import PHONE, silent_page

pytest.importorskip("playwright.sync_api", reason="pip install playwright")
pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python")
pytest.importorskip("jupyter_book", reason="the book is not built on this stack")
from shardwise_book import site as pages

STILL = "* { transition: none !important; animation: none !important; }"
# Contrast, four fifths of the time, is asked of one element of each kind: same colour, font and
# three tags with their classes. All else is asked of the whole page, in which code then is plain
# text: its coloured pieces are half of all elements, and say nothing but their colours.
RUN = """async () => {
  const kinds = new Map();
  for (const e of document.body.querySelectorAll("*")) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    const s = getComputedStyle(e), above = [];
    for (let p = e; p && above.length < 3; p = p.parentElement)
      above.push(p.tagName, p.className, p.getAttribute("style"));
    const kind = [s.color, s.fontSize, s.fontWeight, s.opacity, ...above].join("|");
    if (!kinds.has(kind) && e.checkVisibility()) kinds.set(kind, e);
  }
  const told = { resultTypes: ["violations"], preload: false }, contrast = "color-contrast";
  const found = [];
  if (kinds.size)
    found.push(await axe.run({ include: [...kinds.values()] }, { ...told, runOnly: [contrast] }));
  for (const code of document.querySelectorAll("pre:not(:has(:not(span)))"))
    code.textContent = code.textContent;
  found.push(await axe.run({ ...told, rules: { [contrast]: { enabled: false } } }));
  return found.flatMap(({ violations }) => violations).flatMap(({ id, help, nodes }) =>
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
        pale = "<p>dark</p><p style='color: #aaa; background: #fff'>pale</p>"
        page.set_content(f"{pale}<img src='data:,'>")
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
        assert pages.mend(written) == mended
