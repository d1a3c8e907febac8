"""Questions: what may be asked, and how a browser judges, explains and keeps the answers."""

import re

import numpy as np
import pytest
from browser import (
    DESKTOP,
    NAME,
    PHONE,
    SITE_SCRIPTS,
    check_stands_alone,
    expect,
    serve,
    silent_page,
    write_page,
)

from shardwise_book import figures

BYTES = figures.fill_in(
    "How many bytes does `psum` send?",
    np.int64(65_536),
    unit="bytes",
    why="Twice `32,768`.",
    wrong={8192: "That is the payload."},
)
SHARE = figures.fill_in("Which share waits?", 0.3, unit="%", why="3 of 10 ticks.")
LAYOUT = figures.choose(
    "Which layout sends nothing?",
    right="rows of `both`",
    wrong={"columns of both": "Then x must move.", "rows & <columns>": "One of them moves."},
    why="Each row is where it is needed.",
)


def test_a_chapters_call():
    shown = figures.questions(BYTES, LAYOUT)._repr_html_().split("<script>")[0]
    assert shown.count("<fieldset") == shown.count("<details>") == 2
    assert "1. How many bytes does <code>psum</code> send?" in shown
    assert "<b>65,536 bytes</b>" in shown and "Twice <code>32,768</code>." in shown
    assert "Not <b>8,192 bytes</b>: " in shown
    assert "rows &amp; &lt;columns&gt;" in shown


def test_the_place_of_the_right_option_tells_nothing():
    places = []
    for i in range(60):
        wrong = {"b": "not b", "c": "not c"}
        one = figures.choose(f"Question {i}?", right="a", wrong=wrong, why="because")
        places.append(re.findall(r'value="(\d)"', one.controls).index("0"))
        again = figures.choose(f"Question {i}?", right="a", wrong=wrong, why="because")
        assert again == one
    assert all(10 <= places.count(place) <= 30 for place in range(3))


FILL, CHOOSE = {"prompt": "How many?", "answer": 8, "why": "Eight."}, {"prompt": "Which?"}
CHOOSE |= {"right": "a", "wrong": {"b": "not b"}, "why": "a is."}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"answer": float("nan")}, r"How many\?.*expected a finite number, got nan"),
        ({"answer": True}, "expected a finite number, got True"),
        ({"answer": np.ones(2)}, "one number, got an array"),
        ({"answer": "8"}, "expected a finite number, got '8'"),
        ({"wrong": {8: "No."}}, "the wrong answer 8 is within 0% of the right one, 8"),
        ({"answer": 8.0, "wrong": {8.05: "No."}}, "the wrong answer 8.05 is within 1%"),
        ({"wrong": {float("inf"): "No."}}, "finite number, got inf"),
        ({"wrong": {7: " "}}, "a text is empty"),
        ({"why": ""}, "a text is empty"),
        ({"prompt": "How `many?"}, "a backtick has no partner"),
        ({"tolerance": 1}, "tolerance=1: expected a share"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
    ],
)
def test_refused_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        figures.fill_in(**FILL | change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"wrong": {}}, r"Which\?.*no wrong option"),
        ({"wrong": {"A ": "not a"}}, "two of the options are the same"),
        ({"wrong": {"": "not that"}}, "a text is empty"),
        ({"why": "`"}, "a backtick has no partner"),
    ],
)
def test_refused_choices(change, message):
    with pytest.raises(ValueError, match=message):
        figures.choose(**CHOOSE | change)


def test_refused_lists():
    with pytest.raises(ValueError, match="one question or more"):
        figures.questions()
    with pytest.raises(ValueError, match="prompt of its own"):
        figures.questions(BYTES, BYTES)
    with pytest.raises(TypeError, match=r"got 'Which': expected what figures\.fill_in"):
        figures.questions("Which")


def test_is_small_fetches_nothing_and_may_stand_twice_on_a_page():
    one, two = (figures.questions(BYTES, SHARE, LAYOUT)._repr_html_() for _ in range(2))
    check_stands_alone(one, two, 20_000)
    names = [{*re.findall(r'name="([^"]+)"', text)} for text in (one, two)]
    assert len(names[0]) == 1 and not names[0] & names[1]


# In the browser


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_page(tmp_path_factory.mktemp("questions"), figures.questions(BYTES, SHARE, LAYOUT))


@pytest.fixture(scope="module")
def opened(browser, place):
    """A page on which nothing is kept: each test answers anew."""
    with silent_page(browser, viewport=DESKTOP) as page:
        page.goto(place)
        yield page


def asked(page, number):
    """The question with this number: a field or options, a button, and what is said of both."""
    return page.locator("[data-question]").nth(number - 1)


def answer(question, text):
    """Type it, or choose it, check, and return what is said."""
    field = question.get_by_role("textbox")
    if field.count():
        field.fill(text)
    else:
        question.get_by_role("radio", name=text, exact=True).check()
    question.get_by_role("button", name="Check").click()
    return question.get_by_role("status").inner_text()


RIGHT = "Right. Twice 32,768."
JUDGED = {
    "65536": RIGHT,
    " 65,536 Bytes ": RIGHT,
    "65 536 b": RIGHT,
    "65\u2009536": RIGHT,
    "65_536": RIGHT,
    "65536.0 byte": RIGHT,
    "64 KiB": RIGHT,
    "64kib": RIGHT,
    "65.5 kB": RIGHT,
    "0.0625 MiB": RIGHT,
    "2^16": RIGHT,
    "8 × 8,192": RIGHT,
    "8x8192 bytes": RIGHT,
    "2**20/16": RIGHT,
    "8192": "No. That is the payload.",
    "8 KiB": "No. That is the payload.",
    "65537": "No, the answer is smaller.",
    "-65536": "No, the answer is larger.",
    "64 kB": "No, the answer is larger.",
    "": "Type a number first.",
    "many": "That is no number",
    "1,02,4": "That is no number",
    "12 ms": "The unit ms does not fit here: the answer is in bytes.",
    "5 s": "The unit s does not fit here",
    "3 constructor": "The unit constructor does not fit",
}


def test_numbers_are_judged(opened):
    question = asked(opened, 1)
    for text, expected in JUDGED.items():
        assert answer(question, text).startswith(expected), text
        right = question.locator(".verdict.right").count()
        assert right == (expected == RIGHT), text


def test_shares_within_the_tolerance(opened):
    question = asked(opened, 2)
    for text in "0.3", "0.3 %", ".3%", "0,3", "0.302", "3/10 percent", "0.003 ":
        told = answer(question, text)
        assert told.startswith("Right. 3 of 10" if "003" not in text else "No, the"), text


UNITS = [
    ("", 0.125, "12.5 %"),
    ("", 0.125, "1/8"),
    ("ring bytes", 2048, "2 KiB"),
    ("bytes on each device", 2048, "2048 bytes"),
    ("ticks", 27, "27 tick"),
    ("s", 0.0015, "1.5 ms"),
    ("MB", 24.44, "24,440,000 bytes"),
    ("%", 40, "0.4 of"),
]


def test_units(browser, tmp_path):
    one = [
        figures.fill_in(f"How much, {i}?", number, unit=unit, why="So.")
        for i, (unit, number, _) in enumerate(UNITS)
    ]
    with silent_page(browser) as page:
        page.goto(write_page(tmp_path, figures.questions(*one)))
        for i, (*_, typed) in enumerate(UNITS, 1):
            told = answer(asked(page, i), typed)
            assert told == "Right. So." if "of" not in typed else told.startswith("The unit of")


def test_choices_are_judged(opened):
    question = asked(opened, 3)
    question.get_by_role("button", name="Check").click()
    assert question.get_by_role("status").inner_text() == "Choose an option first."
    assert answer(question, "columns of both") == "No. Then x must move."
    assert answer(question, "rows & <columns>") == "No. One of them moves."
    assert answer(question, "rows of both") == "Right. Each row is where it is needed."
    assert question.locator("label code").inner_text() == "both"


def test_keyboard_alone(opened):
    first, _, third = (asked(opened, number) for number in (1, 2, 3))
    opened.evaluate("document.body.tabIndex = -1; document.body.focus()")
    for key in "Tab", *"64", "Space", *"KiB", "Enter":
        opened.keyboard.press(key)
    assert first.get_by_role("status").inner_text() == RIGHT
    assert first.get_by_role("textbox").get_attribute("aria-invalid") == "false"
    opened.keyboard.press("Tab")  # Check
    opened.keyboard.press("Tab")  # the answer
    opened.keyboard.press("Enter")
    assert first.get_by_text("That is the payload").is_visible()
    for _ in range(4):
        opened.keyboard.press("Tab")  # field, button and answer of the second; the third's options
    told = set()
    for _ in range(3):
        opened.keyboard.press("ArrowDown")
        opened.keyboard.press("Enter")
        told.add(third.get_by_role("status").inner_text().split()[0])
    assert told == {"Right.", "No."}


def test_without_javascript_each_answer_can_be_read(browser, place):
    with silent_page(browser, viewport=PHONE, java_script_enabled=False) as page:
        page.goto(place)
        assert "Without JavaScript nothing is judged" in page.locator("body").inner_text()
        assert page.get_by_role("button", name="Check").first.is_disabled()
        for number, text in [(1, "65,536 bytes. Twice"), (3, "Each row is where it is needed")]:
            question = asked(page, number)
            assert not question.get_by_text(text).is_visible()
            question.get_by_text("Show the answer").click()
            assert text in question.locator("details").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_names_are_text(browser, tmp_path):
    number = figures.fill_in(f"{NAME}?", 8, unit=NAME, why=NAME, wrong={7: NAME})
    choice = figures.choose(NAME, right=NAME, wrong={f"{NAME}!": NAME}, why=NAME)
    with silent_page(browser) as page:
        page.goto(write_page(tmp_path, figures.questions(number, choice)))
        assert page.title() == "Test" and page.locator("img").count() == 0
        for text in "7", "8":
            assert answer(asked(page, 1), text).endswith(NAME)
        assert answer(asked(page, 2), NAME) == f"Right. {NAME}"


# In the book, which keeps the answers


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Two pages with the site's script, and contents that lead to both."""
    folder = tmp_path_factory.mktemp("book")
    contents = '<nav id="contents"><ul><li><a href="one.html">One</a></li>'
    contents += '<li><a href="two.html">Two</a></li></ul></nav><a class="menu" href="#"></a>'
    pages = {"one": figures.questions(BYTES, SHARE, LAYOUT), "two": figures.questions(SHARE)}
    for name, shown in pages.items():
        head = '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">'
        text = (
            f"{head}<title>{name}</title><main>{shown._repr_html_()}</main>{contents}{SITE_SCRIPTS}"
        )
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


def contents_are(page, expected):
    """Also if what the last page kept arrives a little after this one is shown."""
    expect(page.locator("#contents li")).to_have_text(expected, use_inner_text=True)


def turn_to(page, title):
    """As readers do, by a link: an address typed anew may be another process's, and Chromium has
    once not told that process what the last page of a file kept."""
    page.locator("#contents").get_by_role("link", name=title).click()
    expect(page).to_have_title(title.lower())


@pytest.mark.parametrize("origin", ["file", "server"])
def test_answers_are_kept_and_counted_in_the_contents(browser, book, origin):
    with serve(book) as server, silent_page(browser, viewport=DESKTOP) as page:
        start = book.as_uri() if origin == "file" else server
        page.goto(f"{start}/one.html")
        contents_are(page, ["One", "Two"])
        answer(asked(page, 1), "8192")
        contents_are(page, ["One 0 of 3 questions right", "Two"])
        answer(asked(page, 1), "64 KiB")
        answer(asked(page, 3), "rows of both")
        contents_are(page, ["One 2 of 3 questions right", "Two"])
        turn_to(page, "Two")
        contents_are(page, ["One 2 of 3 questions right", "Two"])
        assert asked(page, 1).get_by_role("textbox").input_value() == ""
        turn_to(page, "One")
        expect(asked(page, 1).get_by_role("textbox")).to_have_value("64 KiB")
        assert asked(page, 1).get_by_role("status").inner_text() == RIGHT
        assert asked(page, 2).get_by_role("status").inner_text() == ""
        assert asked(page, 3).get_by_role("radio", name="rows of both").is_checked()
        page.get_by_role("button", name="Forget them").click()
        contents_are(page, ["One", "Two"])
        assert asked(page, 1).get_by_role("textbox").input_value() == ""
        assert asked(page, 1).get_by_role("status").inner_text() == ""
        page.reload()
        contents_are(page, ["One", "Two"])


def test_two_tabs_agree(browser, book):
    with serve(book) as server, silent_page(browser, viewport=DESKTOP) as page:
        page.goto(f"{server}/one.html")
        same, other = page.context.new_page(), page.context.new_page()
        same.goto(f"{server}/one.html")
        other.goto(f"{server}/two.html")
        answer(asked(page, 1), "64 KiB")
        for tab in (same, other):
            contents_are(tab, ["One 1 of 3 questions right", "Two"])
        assert asked(same, 1).get_by_role("status").inner_text() == RIGHT
        assert asked(other, 1).get_by_role("textbox").input_value() == ""
        same.get_by_role("button", name="Forget them").click()
        for tab in (page, other):
            contents_are(tab, ["One", "Two"])
        assert asked(page, 1).get_by_role("textbox").input_value() == ""


REFUSALS = {
    "refused": "Object.defineProperty(window, 'localStorage', "
    "{ get() { throw new DOMException('no', 'SecurityError'); } });",
    "full": "Storage.prototype.setItem = () => { throw new DOMException('full'); };",
    "absent": "Object.defineProperty(window, 'localStorage', { value: null });",
    "damaged": "Object.keys({ ...localStorage }).length || localStorage.setItem("
    "`questions ${location.pathname.replace('.html', '')}`, '{');",
    "of another shape": "localStorage.setItem("
    "`questions ${location.pathname.replace('.html', '')}`, '[null, 3]');",
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_works_where_nothing_can_be_kept(browser, book, refusal):
    with silent_page(browser, viewport=DESKTOP) as page:
        page.add_init_script(REFUSALS[refusal])
        page.goto((book / "one.html").as_uri())
        assert answer(asked(page, 1), "64 KiB") == RIGHT
        assert answer(asked(page, 3), "columns of both") == "No. Then x must move."
        contents_are(page, ["One 1 of 3 questions right", "Two"])
