"""What holds for every explorer: opened in a browser once with its script and once without."""

import contextlib
import random
from types import SimpleNamespace

import pytest
from browser import DESKTOP, NAME, PHONE, check_stands_alone, expect, silent_page, write_page
from explorers import EXPLORERS, States, rings, slices
from sampling import marked, sample

from shardwise import mesh
from shardwise_book import figures
from shardwise_book.figures.interactive import Control, Interactive, Refusal, explorer

NARROW = PHONE | {"width": 360}


@pytest.fixture(scope="module", autouse=True)
def eight():
    mesh.simulate(8)


# Chapters' own: drawing some takes a second.
@pytest.mark.parametrize("name", marked(EXPLORERS, sample(EXPLORERS, 4)))
def test_is_small_fetches_nothing_and_may_stand_twice_on_a_page(name):
    one, two = (EXPLORERS[name].figure()._repr_html_() for _ in range(2))
    check_stands_alone(one, two, 110_000 if name == "pipeline" else 60_000)


def test_data_cannot_end_the_script():
    shown = Interactive("player.js", {"text": "</script><b>"}, "")._repr_html_()
    assert shown.count("</script>") == 2 and "<b>" not in shown


def test_a_start_that_is_not_on_offer_is_an_error():
    with pytest.raises(ValueError, match="Size starts at option 2; on offer are 0 to 1: a, b"):
        explorer({"size": Control("Size", "ab")}, "", start={"size": 2})


def test_a_function_that_nothing_shows_is_an_error():
    """As where the layout's element, or the parameter of another function, has another name."""
    controls, parts = {"size": Control("Size", (1, 2))}, {"twice": lambda size: 2 * size}
    layout = '<p id="@result"></p><p id="@bars"></p>'
    with pytest.raises(ValueError, match=r"nothing shows what 'bar' makes: .* id=\"@bar\""):
        explorer(controls, layout, **parts, result=lambda twice: f"{twice}", bar=lambda size: "")
    shown = States(explorer(controls, layout, **parts, result=lambda twice: f"{twice}"))
    assert shown.shown(size=1) == {"result": "4"}


def test_a_fixed_value_that_can_be_called_is_a_value():
    controls, made = {"size": Control("Size", (1, 2))}, {"result": lambda size, twice: twice(size)}
    shown = States(explorer(controls, "", fixed={"twice": lambda size: str(2 * size)}, **made))
    assert shown.shown(size=1) == {"result": "4"}


def test_what_a_refusal_reaches_is_empty_and_the_result_tells_it():
    controls = {
        "size": Control("Size", (1, 2)),
        "part": Control("Part", lambda parts: range(parts)),
    }
    made = {
        "parts": lambda size: Refusal("1 < 2 is too small.") if size == 1 else size,
        "result": lambda parts: f"{parts} parts",
        "bars": lambda parts, part: (f"bar {i}, " for i in range(parts)),
        "name": lambda size: f"size {size}",
    }
    layout = '<p id="@result"></p><p id="@bars"></p><p id="@name"></p>'
    states = States(explorer(controls, layout, **made))
    told = '<span class="error">1 &lt; 2 is too small.</span>'
    assert states.options("part", size=0) == ["0"] and states.options("part", size=1) == ["0", "1"]
    assert states.shown(size=0) == {"result": told, "bars": "", "name": "size 1"}
    assert states.shown(size=1) == {"result": "2 parts", "bars": "bar 0, bar 1, ", "name": "size 2"}


@pytest.fixture(scope="module", params=EXPLORERS)
def opened(request, browser, tmp_path_factory):
    """The page of a figure: twice the same, and one of callers' names where there are any."""
    example = EXPLORERS[request.param]
    drawn = [example.figure(), example.figure(), *(make() for make in [example.named] if make)]
    place = write_page(tmp_path_factory.mktemp(request.param), *drawn)
    with contextlib.ExitStack() as pages:
        alive = pages.enter_context(silent_page(browser, viewport=DESKTOP))
        still = pages.enter_context(
            silent_page(browser, viewport=NARROW, java_script_enabled=False)
        )
        for page in alive, still:
            page.goto(place)
        found = alive.locator(".shardwise-figure").all()
        for figure in found:
            expect(figure.locator("fieldset")).to_be_enabled()
        yield SimpleNamespace(
            states=States(drawn[0]),
            page=alive,
            figures=found,
            still=still,
            stills=still.locator(".shardwise-figure").all(),
        )


FITS = "(root) => root.offsetLeft + root.scrollWidth <= innerWidth"
# What a part shows, without the name of its figure; and what a browser makes of a text there.
SHOWN = """(root, names) => names.map((name) => document.getElementById(`${root.id}-${name}`)
  .innerHTML.replaceAll(root.id, ""))"""
WRITTEN = """(root, texts) => Object.entries(texts).map(([name, text]) => {
  const copy = document.getElementById(`${root.id}-${name}`).cloneNode();
  copy.innerHTML = text.replaceAll("<style>#@", "<style>#-");
  return copy.innerHTML;
})"""


def shown(figure, states):
    return figure.evaluate(SHOWN, list(states.parts))


def agrees(figure, states):
    """Asserts that a figure shows what was drawn for its controls; returns what these say."""
    inputs = figure.locator("select, input").evaluate_all("all => all.map((e) => Number(e.value))")
    at = dict(zip(states.controls, inputs, strict=True))
    assert shown(figure, states) == figure.evaluate(WRITTEN, states.shown(**at)), at
    return at


def test_the_still_is_what_the_script_shows_first(opened):
    """And makes sense without it, on a phone: its controls do not pretend."""
    for still, alive in zip(opened.stills, opened.figures, strict=True):
        assert still.inner_text().split("shows one")[1].split("\n", 1)[1].strip()
        for picture in still.locator("svg, [role=img]").all():
            assert picture.is_visible() and picture.get_attribute("aria-label")
        assert still.get_by_role("status").is_visible()
        for one in still, alive:
            for control in one.locator("select, input").all():
                assert control.is_disabled() == (one is still)
    assert all(still.evaluate(FITS) for still in opened.stills[:2])
    first = agrees(opened.figures[0], opened.states)
    still = opened.stills[0].evaluate(SHOWN, list(opened.states.parts))
    assert still == opened.figures[0].evaluate(WRITTEN, opened.states.shown(**first))


def test_names_are_text(opened):
    """A caller's name stands as it is, before the script runs and afterwards."""
    for page, found in (opened.still, opened.stills), (opened.page, opened.figures):
        assert page.title() == "Test" and page.locator("img").count() == 0
        for named in found[2:]:
            said = named.locator("[role=status]").inner_text()
            assert NAME in " ".join([said, *named.locator("svg, option").all_text_contents()])


def test_every_control_moves_by_keyboard(opened):
    states, page, figure = opened.states, opened.page, opened.figures[0]
    other = shown(opened.figures[1], states)
    page.evaluate("document.body.tabIndex = -1; document.body.focus()")
    for name in states.controls:
        page.keyboard.press("Tab")
        moved = figure.locator(":focus")
        assert moved.get_attribute("id").endswith(f"-{name}")
        page.keyboard.press("Home")
        seen = []
        while (value := int(moved.input_value())) not in seen:
            seen.append(value)
            at = agrees(figure, states)
            page.keyboard.press("ArrowRight" if moved.get_attribute("type") else "ArrowDown")
        assert seen == list(range(len(states.options(name, **at)))), name
    if "step" in states.controls:
        step_by_keyboard(opened, figure)
    assert shown(opened.figures[1], states) == other  # which nobody touched


def step_by_keyboard(opened, figure):
    """From the slider, at its end, through the buttons below it: no step leaves the run."""
    states, page = opened.states, opened.page
    back, forward = (figure.get_by_role("button", name=name) for name in ("Back", "Next"))
    last = agrees(figure, states)["step"]
    assert forward.get_attribute("aria-disabled") == "true"
    page.keyboard.press("Tab")
    for _ in range(last + 2):
        page.keyboard.press("Enter")  # Back
    assert agrees(figure, states)["step"] == 0
    assert back.get_attribute("aria-disabled") == "true"
    page.keyboard.press("Tab")  # Play
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # Next
    assert agrees(figure, states)["step"] == 1
    for _ in range(last + 1):
        page.keyboard.press("Enter")
    assert agrees(figure, states)["step"] == last
    for control in figure.get_by_role("combobox").all():  # to runs that may be shorter
        control.press("Home")
        agrees(figure, states)


def test_states_show_what_was_drawn_for_them_and_fit_a_phone(opened):
    states, page, figure = opened.states, opened.page, opened.figures[0]
    page.set_viewport_size(NARROW)
    every = states.every()
    for at in random.Random(0).sample(every, min(40, len(every))):
        figure.evaluate(
            """(root, at) => Object.entries(at).forEach(([name, number]) => {
              const control = document.getElementById(`${root.id}-${name}`);
              control.value = number;
              control.dispatchEvent(new Event("input", { bubbles: true }));
            })""",
            at,
        )
        assert agrees(figure, states) == at
        assert figure.evaluate(FITS), at
    page.set_viewport_size(PHONE)


@pytest.fixture
def show(browser, tmp_path):
    """Opens a figure on a page of its own: (page, its figure, its states)."""
    with contextlib.ExitStack() as pages:

        def show(figure, **settings):
            page = pages.enter_context(silent_page(browser, **settings))
            page.clock.install()
            page.goto(write_page(tmp_path, figure))
            found = page.locator(".shardwise-figure")
            expect(found.locator("fieldset")).to_be_enabled()
            return page, found, States(figure)

        yield show


def test_plays_to_the_end_and_pauses(show):
    page, figure, states = show(figures.ring_stepper(rings()), viewport=DESKTOP)

    def step():
        return agrees(figure, states)["step"]

    play = figure.get_by_role("button", name="Play")
    page.clock.run_for(10_000)
    assert step() == 1  # nothing moves by itself
    play.press("Enter")
    play = figure.locator("button").nth(1)
    assert play.inner_text() == "Pause"
    page.clock.run_for(1_000)
    assert step() == 2
    play.press("Enter")
    page.clock.run_for(10_000)
    assert step() == 2 and play.inner_text() == "Play"
    play.press("Enter")
    page.clock.run_for(10_000)
    assert step() == 3 and play.inner_text() == "Play"
    play.press("Enter")  # at the end: from the start
    assert step() == 0
    page.clock.run_for(1_000)
    figure.get_by_role("button", name="Back").click()  # the reader takes over
    page.clock.run_for(10_000)
    assert step() == 0 and play.inner_text() == "Play"


def test_less_motion_is_stepped_by_hand(show):
    _, figure, _ = show(figures.ring_stepper(rings()), reduced_motion="reduce")
    assert figure.locator("button:visible").all_inner_texts() == ["Back", "Next"]


def test_the_pointer_chooses_a_task_and_a_shorter_order_keeps_its_last(show):
    page, figure, states = show(figures.pipeline_explorer(), viewport=NARROW, has_touch=True)

    def picked():
        at = agrees(figure, states)
        return at["device"], at["task"]

    def choose(name, option):
        figure.get_by_role("combobox", name=name, exact=True).select_option(label=option)

    def box(device, task):
        return figure.locator(f'[data-chooses="device={device} task={task}"]')

    box(2, 9).hover()
    assert picked() == (2, 9)
    page.mouse.move(0, 0)
    figure.get_by_role("slider", name="Device").press("End")
    figure.get_by_role("slider", name="Task").press("End")
    assert picked() == (3, 15)
    choose("Microbatches", "2")
    choose("Devices", "2")
    assert picked() == (1, 3)
    choose("Devices", "4")
    choose("Schedule", "zb_h1")  # takes four or more
    assert "it takes 4 or more" in figure.get_by_role("status").inner_text()
    picked()
    choose("Microbatches", "8")
    choose("Schedule", "dualpipe_v")
    box(3, 20).tap()
    assert picked() == (3, 20)


def test_pointing_at_an_equation_chooses_the_slice_that_computes_it(show):
    _, figure, states = show(slices())
    figure.locator(".node", has_text="swap").hover()
    assert agrees(figure, states) == {"slice": 2}


def test_what_another_mesh_lacks_is_given_up_and_what_it_has_is_kept(show):
    _, figure, states = show(EXPLORERS["resharding"].figure())
    figure.get_by_role("slider", name="Device").press("End")
    figure.get_by_role("combobox", name="Restored onto mesh").press("Home")  # one device
    assert [agrees(figure, states)[name] for name in ("mesh1", "spec1", "device")] == [0, 0, 0]
    _, other, _ = show(EXPLORERS["resharding"].named())
    spec, onto = (
        other.get_by_role("combobox", name=name) for name in ("Restored spec", "Restored onto mesh")
    )
    spec.select_option(index=1)
    onto.select_option(index=1)
    assert (onto.input_value(), spec.input_value()) == ("1", "0")
    onto.select_option(index=0)
    assert spec.input_value() == "1"  # held, though options show one space
