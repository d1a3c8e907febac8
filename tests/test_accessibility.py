"""axe-core on the built site: every page, light and dark, wide and on a phone, has no violation."""

import functools
from importlib.resources import files

import pytest
from browser import DESKTOP, PHONE, silent_page

pytest.importorskip("playwright.sync_api", reason="pip install playwright")
pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python")
pytest.importorskip("jupyter_book", reason="the book is not built on this stack")
from shardwise_book import accessible
from test_site import CHAPTERS, PAGES

VIEWS = [(mode, viewport) for mode in ("light", "dark") for viewport in (PHONE, DESKTOP)]
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
    page.add_style_tag(content=STILL)
    page.wait_for_timeout(100)  # what overflows is measured after the page was laid out
    page.evaluate(axe())
    return page.evaluate(RUN)


def check(browser, site, names, mode, viewport):
    found = {}
    with silent_page(browser, viewport=viewport, color_scheme=mode) as page:
        for name in names:
            page.goto(f"{site.as_uri()}/{name}.html")
            found[name] = violations(page)
    told = [f"{name}: {one}" for name, all_ in found.items() for one in all_]
    assert not told, "\n".join([f"{len(told)} violations", *told[:30]])


@pytest.mark.parametrize(
    "view", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, len(VIEWS)))]
)
def test_no_violations(browser, site, view):
    """Each page in one of the views, in turn."""
    check(browser, site, PAGES[view :: len(VIEWS)], *VIEWS[view])


@pytest.mark.slow
@pytest.mark.parametrize("view", range(len(VIEWS)))
def test_no_violations_in_the_opposite_view(browser, site, view):
    """Of the other scheme and the other width: so each page is seen in both of each."""
    opposite = len(VIEWS) - 1 - view
    check(browser, site, PAGES[opposite :: len(VIEWS)], *VIEWS[view])


def test_opposite_views_have_nothing_in_common():
    for one, other in zip(VIEWS, reversed(VIEWS), strict=True):
        assert one[0] != other[0] and one[1] != other[1]


def test_no_violations_with_everything_open(browser, site):
    """Solutions, folded cells and the contents of a phone are closed at first."""
    with silent_page(browser, viewport=PHONE, color_scheme="dark") as page:
        page.goto(f"{site.as_uri()}/{CHAPTERS[0]}.html")
        page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        page.get_by_role("button", name="Contents").click()
        assert violations(page) == []


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


def test_what_overflows_can_be_scrolled_by_keyboard(browser, site):
    with silent_page(browser, viewport=DESKTOP) as page:
        page.goto(f"{site.as_uri()}/{CHAPTERS[0]}.html")
        stops = page.locator("article pre[tabindex='0']")
        before = stops.count()
        page.set_viewport_size(PHONE)
        page.wait_for_function(
            f"document.querySelectorAll(\"pre[tabindex='0']\").length > {before}"
        )
        stops.first.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function("document.activeElement.scrollLeft > 0")
        page.set_viewport_size(DESKTOP)
        page.wait_for_function(
            f"document.querySelectorAll(\"pre[tabindex='0']\").length === {before}"
        )
