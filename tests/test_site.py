"""The built site in a real browser: silent, offline, searchable, legible on a phone, linked."""

import functools
import gzip
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from browser import DESKTOP, PHONE, launch, silent_page

pytest.importorskip("playwright.sync_api", reason="pip install playwright")
from playwright import sync_api
from test_accessibility import STILL, violations

ROOT = Path(__file__).parent.parent
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
CHAPTERS = [entry["file"] for part in TOC["parts"] for entry in part["chapters"]]
CHAPTERS = [name for name in CHAPTERS if name.startswith("chapters/")]
PAGES = [TOC["root"], *(e["file"] for part in TOC["parts"] for e in part["chapters"])]
PAGES += ["search", "genindex"]


class Document(HTMLParser):
    """What one page links to (`links`), loads (`loads`), shows (`images`) and names (`ids`)."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.images, self.ids = [], [], [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids.add(attrs.get("id"))
        if tag == "a" and "href" in attrs:
            self.links.append(attrs["href"])
        elif tag == "link" and attrs.get("rel") in ("stylesheet", "icon"):
            self.loads.append(attrs["href"])
        elif tag == "script" and "src" in attrs:
            self.loads.append(attrs["src"])
        elif tag == "img":
            self.images.append((attrs["src"], attrs.get("alt")))


@functools.cache
def document(path):
    return Document(path)


def target(source, reference):
    """(file, anchor) that a reference on the page `source` leads to; None where it leaves."""
    address = urlsplit(reference)
    if address.scheme or address.netloc:
        return None
    path = (source.parent / unquote(address.path)).resolve() if address.path else source
    return path, unquote(address.fragment)


@pytest.mark.parametrize("ci, outcome", [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_missing_browser(monkeypatch, ci, outcome):
    class Nothing:
        def launch(self, **settings):
            raise sync_api.Error("no executable")

        chromium = property(lambda self: self)

    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="playwright install chromium"):
        launch(Nothing())


VISITS = {("file", "light"): [DESKTOP, PHONE], ("server", "dark"): [PHONE, DESKTOP]}


@pytest.mark.parametrize("origin, mode", VISITS)
def test_every_page(browser, site, server, origin, mode):
    """Silent, legible, no wider than a screen or a phone's, with its contents; light and dark.

    It is opened at one width and goes on at the other, in the other scheme the other way round.
    axe-core is asked at every other page's first width and at the others' second: so each page is
    judged in both schemes and at both widths.
    """
    start, told = site.as_uri() if origin == "file" else server, []
    with silent_page(browser, color_scheme=mode) as page:
        for number, name in enumerate(PAGES):
            found = []
            for turn, viewport in enumerate(VISITS[origin, mode]):
                page.set_viewport_size(viewport)
                if turn == 0:
                    page.goto(f"{start}/{name}.html")
                    page.add_style_tag(content=STILL)
                page.wait_for_timeout(100)  # what a script still asks for, and measures
                assert page.locator("html").get_attribute("data-theme") == mode
                found += [*unfit(page, viewport), *pale(page)]
                if number % 2 == turn:
                    found += violations(page)
                if viewport is PHONE and name != "search":
                    assert page.locator("input[name=q]:visible").count() == 0, name
                    menu = page.get_by_role("button", name="Contents")
                    menu.click()
                    page.locator("#contents").wait_for(state="visible")
                    assert page.locator("input[name=q]:visible").count() == 1, name
                    menu.click()
                else:
                    assert page.locator("input[name=q]:visible").count() == 1, name
            told += [f"{name}, {mode}: {one}" for one in found]
    assert not told, "\n".join([f"{len(told)} faults", *told[:30]])


def test_a_page_is_judged_at_both_widths():
    for one, other in zip(*VISITS.values(), strict=True):
        assert one is not other


def unfit(page, viewport):
    width = page.evaluate("document.documentElement.scrollWidth")
    return [f"is {width} px wide"] if width > viewport["width"] else []


def pale(page):
    """What has less than 4.5:1, of running text, links and code (WCAG 2.1, AA)."""
    pairs = page.evaluate(COLOURS)
    assert pairs
    for what, text, ground in pairs:
        ratio = contrast(colour(text), colour(ground))
        if ratio < 4.5:
            yield f"{what} has {ratio:.1f}:1 ({text} on {ground})"


COLOURS = """() => {
  const behind = (e) => { for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor;
    if (!/(, 0\\)|transparent)/.test(c)) return c; } return "rgb(255, 255, 255)"; };
  const seen = new Map();
  for (const e of document.querySelectorAll("main *, #contents a, .here a")) {
    if (e.closest("svg, math, .cell_output [style]") ||
        e.closest("[class*='-Color']")) continue;
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (e.matches("a.headerlink")) continue;
    const key = getComputedStyle(e).color + "|" + behind(e);
    if (!seen.has(key)) seen.set(key, [e.tagName + "." + e.className + " " +
      e.textContent.trim().slice(0, 30), getComputedStyle(e).color, behind(e)]);
  }
  return [...seen.values()];
}"""


def colour(css):
    return [float(number) for number in re.findall(r"[\d.]+", css)[:3]]


def contrast(one, other):
    def luminance(rgb):
        parts = [c / 255 for c in rgb]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted([luminance(one), luminance(other)], reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("origin", ["file", "server"])
def test_search_finds(browser, site, server, origin):
    start = site.as_uri() if origin == "file" else server
    with silent_page(browser, viewport=DESKTOP) as page:
        page.goto(f"{start}/{PAGES[-3]}.html")
        page.locator("input[name=q]:visible").fill("replicate")
        page.keyboard.press("Enter")
        page.wait_for_selector("#search-results li a")
        page.wait_for_function("!/Searching/.test(document.querySelector('h2').textContent)")
        assert "search.html?q=replicate" in page.url
        assert page.locator("#search-results li a", has_text="Glossary").count() >= 1
        excerpts = page.locator("#search-results p.context")
        if origin == "server":
            excerpts.first.wait_for()
            assert "replicate" in " ".join(excerpts.all_inner_texts()).lower()
        page.locator("#search-results li a", has_text="Glossary").first.click()
        assert "book/glossary.html" in page.url


def test_search_says_when_it_finds_nothing(page):
    page.open("search")
    page.locator("input[name=q]").fill("xylophones")
    page.keyboard.press("Enter")
    page.wait_for_function("/not match/.test(document.querySelector('#search-results')?.innerText)")


def test_light_and_dark_can_be_switched_and_are_remembered(browser, server):
    with silent_page(browser, viewport=DESKTOP, color_scheme="light") as page:
        page.goto(f"{server}/{TOC['root']}.html")
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.locator("button.mode:visible").click()
        after = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert sum(colour(after)) < sum(colour(before)) / 2
        page.goto(f"{server}/book/glossary.html")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == after
        page.locator("button.mode:visible").click()  # back to what the system says: forgotten
        page.emulate_media(color_scheme="dark")
        page.reload()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == after


def test_contents_open_and_close_by_keyboard(browser, site):
    with silent_page(browser, viewport=PHONE) as page:
        page.goto(f"{site.as_uri()}/book/glossary.html")
        menu = page.get_by_role("button", name="Contents")
        menu.focus()
        page.keyboard.press("Enter")
        page.locator("#contents").wait_for(state="visible")
        assert menu.get_attribute("aria-expanded") == "true"
        page.keyboard.press("Escape")
        page.locator("#contents").wait_for(state="hidden")
        assert page.evaluate("document.activeElement.className") == "menu"
        page.keyboard.press("Space")
        page.locator("#contents").wait_for(state="visible")


def test_without_javascript(browser, site):
    with silent_page(browser, viewport=DESKTOP, java_script_enabled=False) as page:
        for name in PAGES:
            page.goto(f"{site.as_uri()}/{name}.html")
            for viewport in (DESKTOP, PHONE):
                page.set_viewport_size(viewport)
                assert page.locator("main h1").first.is_visible(), name
                assert page.locator("#contents a", has_text="Glossary").is_visible(), name
                assert page.evaluate(UNSEEN) == [], name
                assert page.locator("button.mode:visible, button.copy:visible").count() == 0, name


UNSEEN = """() => [...document.querySelectorAll("main figure img, main figure svg")].filter((e) => {
  const { width, height } = e.getBoundingClientRect();
  return width <= 50 || height === 0 || getComputedStyle(e).visibility !== "visible";
}).map((e) => e.outerHTML.slice(0, 100))"""


def test_copy_button_copies_the_cell(browser, server):
    with silent_page(browser, viewport=DESKTOP) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.goto(f"{server}/{CHAPTERS[0]}.html")
        cell = page.locator("div.cell_input:visible").first
        cell.locator("pre").hover()
        cell.locator("button.copy").click()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied and copied == cell.locator("pre").text_content()
        assert "Copy" not in copied


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(site, name):
    source = site / f"{name}.html"
    places = [target(source, link) for link in document(source).links]
    assert places
    for path, anchor in filter(None, places):
        assert path.exists(), f"{name}: link to {path}, which is not there"
        if anchor and path.suffix == ".html":
            assert anchor in document(path).ids, f"{name}: no #{anchor} in {path.name}"


@pytest.mark.parametrize("name", PAGES)
def test_images_say_what_they_show(site, name):
    source = site / f"{name}.html"
    for src, alt in document(source).images:
        if "_static/mark.svg" in src:
            assert alt == ""  # the title beside it says it
            continue
        assert alt and alt.strip(), f"{name}: {src} has no alt text"
        assert not re.search(r"[/\\]|\.(png|svg|jpe?g)$", alt), f"{name}: alt text {alt!r}"


@pytest.mark.parametrize("name", PAGES)
def test_weight(site, name):
    """A page's own HTML under 300 KB, 100 KB compressed; what it loads besides, under 160 KB."""
    source = site / f"{name}.html"
    own = re.sub(r"data:image/[^\"']+", "", source.read_text(encoding="utf-8"))
    assert len(own.encode()) < 300_000
    assert len(gzip.compress(own.encode())) < 100_000
    assert "const part = (name) =>" not in own  # of player.js, which is a file here
    loads = [target(source, load)[0] for load in document(source).loads]
    shared = sum(path.stat().st_size for path in loads if path.name != "searchindex.js")
    assert shared < (60_000 if name == "book/glossary" else 160_000), f"{name} loads {shared} bytes"
    assert name == "search" or not [p for p in loads if "search" in p.name]


def test_formulas_are_drawn_without_a_script(page):
    page.open("book/cheatsheet")
    fractions = page.locator("main math mfrac")
    assert fractions.count() >= 4
    box = fractions.first.bounding_box()
    assert box["height"] > 15, "a fraction stands in two rows"
    assert "$" not in page.locator("main table").first.inner_text()


def test_landing_picture_tells_the_truth(site):
    """The bytes in the picture are those of a float32 array cut over eight devices."""
    import numpy as np

    text = (site / f"{TOC['root']}.html").read_text(encoding="utf-8")
    said = re.search(r'<svg[^>]*class="landing".*?</svg>', text, re.DOTALL)[0]
    shape = [int(n) for n in re.search(r"W \[(\d+), (\d+)\] float32", said).groups()]
    whole = np.zeros(shape, np.float32).nbytes
    assert f"{whole:,} bytes<" in said
    assert f"{whole // 8:,} bytes on each device" in said


def test_one_palette():
    """The style sheet, the mark and the favicon use the colours of `shardwise_book.figures`."""
    from shardwise_book.figures import palette

    css = (ROOT / "book/_static/shardwise.css").read_text()
    devices = re.findall(r"--device-(\d): (#\w+)", css)
    assert devices == [(str(i), colour) for i, colour in enumerate(palette.DEVICES)]
    assert set(re.findall(r"--(?:blue|red|green|purple): (#\w+)", css)) == set(palette.LINES)
    mark = re.findall(r'fill="(#\w+)"', (ROOT / "book/_static/mark.svg").read_text())
    assert mark == list(palette.DEVICES)
    favicon = re.findall(r'fill="(#\w+)"', (ROOT / "book/_static/favicon.svg").read_text())
    assert set(favicon) <= set(palette.DEVICES)


def config():
    return yaml.safe_load((ROOT / "_config.yml").read_text())


def tools(page):
    """The links above a chapter: [(address, the attributes after it, text)]."""
    shown = re.search(
        r'<div class="tools">(.*?)</div>', page.read_text(encoding="utf-8"), re.DOTALL
    )
    return re.findall(r'<a[^>]* href="([^"]*)"([^>]*)>(\w+)</a>', shown[1])


@pytest.mark.parametrize("name", CHAPTERS)
def test_each_chapter_can_be_downloaded_and_more_only_with_an_address(site, name):
    source = site / f"{name}.html"
    links = {text: (address, more) for address, more, text in tools(source)}
    address, more = links["Notebook"]
    assert " download" in more
    assert target(source, address)[0].read_bytes() == (ROOT / f"{name}.ipynb").read_bytes()
    repository = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]["url"]
    assert list(links) == (["Colab", "Notebook", "Source"] if repository else ["Notebook"])


def test_no_violations_with_everything_open(browser, site):
    """Solutions, folded cells and the contents of a phone are closed at first."""
    with silent_page(browser, viewport=PHONE, color_scheme="dark") as page:
        page.goto(f"{site.as_uri()}/{CHAPTERS[0]}.html")
        page.add_style_tag(content=STILL)
        page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        page.get_by_role("button", name="Contents").click()
        page.wait_for_timeout(100)
        assert violations(page) == []


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
