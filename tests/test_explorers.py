"""What holds for every interactive figure, each opened once with its script and once without."""

import contextlib
import html
from types import SimpleNamespace

import pytest
import test_balance_explorer
import test_block_explorer
import test_explorer
import test_fsdp_stepper
import test_lanes_explorer
import test_layer_explorer
import test_loads_explorer
import test_pipeline_explorer
import test_plan_explorer
import test_products_explorer
import test_resharding_explorer
import test_ring_stepper
import test_saving_explorer
import test_slices
import test_split_explorer
from browser import DESKTOP, NAME, PHONE, check_stands_alone, silent_page, write_page
from explorers import SHOWN, values

EXPLORERS = {
    "balance": test_balance_explorer.EXPLORER,
    "block": test_block_explorer.EXPLORER,
    "fsdp": test_fsdp_stepper.EXPLORER,
    "lanes": test_lanes_explorer.EXPLORER,
    "layer": test_layer_explorer.EXPLORER,
    "loads": test_loads_explorer.EXPLORER,
    "mesh": test_explorer.EXPLORER,
    "pipeline": test_pipeline_explorer.EXPLORER,
    "plan": test_plan_explorer.EXPLORER,
    "products": test_products_explorer.EXPLORER,
    "resharding": test_resharding_explorer.EXPLORER,
    "ring": test_ring_stepper.EXPLORER,
    "saving": test_saving_explorer.EXPLORER,
    "slices": test_slices.EXPLORER,
    "split": test_split_explorer.EXPLORER,
}
NARROW = PHONE | {"width": 360}


@pytest.mark.parametrize("name", EXPLORERS)
def test_is_small_fetches_nothing_and_may_stand_twice_on_a_page(name):
    explorer = EXPLORERS[name]
    one, two = (explorer.figure()._repr_html_() for _ in range(2))
    check_stands_alone(one, two, explorer.bytes, explorer.ids)


@pytest.fixture(scope="module", params=EXPLORERS)
def opened(request, browser, tmp_path_factory):
    """The page of a figure: twice the same, and one of callers' names where there are any."""
    explorer = EXPLORERS[request.param]
    drawn = [explorer.figure(), explorer.figure(), *(make() for make in [explorer.named] if make)]
    place = write_page(tmp_path_factory.mktemp(request.param), *drawn)
    with contextlib.ExitStack() as pages:
        alive = pages.enter_context(silent_page(browser, viewport=DESKTOP))
        still = pages.enter_context(
            silent_page(browser, viewport=NARROW, java_script_enabled=False)
        )
        for page in alive, still:
            page.goto(place)
        figures = alive.locator(".shardwise-figure").all()
        yield SimpleNamespace(
            explorer=explorer,
            data=drawn[0].data,
            page=alive,
            figures=figures,
            first=[explorer.same(figure) for figure in figures],
            values=values(figures[0]),
            still=still,
            stills=still.locator(".shardwise-figure").all(),
        )


FITS = "(root) => root.offsetLeft + root.scrollWidth <= innerWidth"


def fits(figures):
    """Whether those two that are a chapter's need no more than the width of the page."""
    return all(one.evaluate(FITS) for one in figures[:2])


def test_the_still_is_what_the_script_draws_first(opened):
    """And makes sense without it, on a phone: its controls do not pretend."""
    assert opened.values == list(opened.explorer.start)
    assert fits(opened.stills)
    for still, alive, first in zip(opened.stills, opened.figures, opened.first, strict=True):
        assert opened.explorer.same(still) == first
        assert still.get_by_role("status").is_visible()
        assert all(picture.is_visible() for picture in still.locator("svg").all())
        assert "Without JavaScript this figure shows one" in still.inner_text()
        for figure in still, alive:
            for control in figure.locator("select, input").all():
                assert control.is_disabled() == (figure is still)


def test_names_are_text(opened):
    """A caller's name stands as it is, before the script runs and afterwards."""
    for page, figures in (opened.still, opened.stills), (opened.page, opened.figures):
        assert page.title() == "Test" and page.locator("img").count() == 0
        for named in figures[2:]:
            said = named.locator("[role=status]").inner_text()
            assert NAME in " ".join([said, *named.locator("svg, option").all_text_contents()])
            assert opened.explorer.told(said), said


def test_every_control_moves_by_keyboard(opened):
    explorer, data, page = opened.explorer, opened.data, opened.page
    figure, other = opened.figures[:2]
    page.evaluate("document.body.tabIndex = -1; document.body.focus()")
    for label, count in explorer.controls.items():
        page.keyboard.press("Tab")
        moved = figure.locator(":focus")
        assert moved.evaluate("e => e.closest('label').firstChild.data") == label
        forward = "ArrowRight" if moved.get_attribute("type") == "range" else "ArrowDown"
        page.keyboard.press("Home")
        seen = []
        while (value := int(moved.input_value())) not in seen:
            seen.append(value)
            explorer.agrees(figure, data)
            page.keyboard.press(forward)
        assert seen == list(range(count)), label
    if explorer.steps:
        step_by_keyboard(opened, figure)
    assert explorer.same(other) == opened.first[1]  # which nobody touched


def step_by_keyboard(opened, figure):
    """From the slider, at its end, through the buttons below it: no step leaves the run."""
    explorer, data, page = opened.explorer, opened.data, opened.page
    back, forward = (figure.get_by_role("button", name=name) for name in ("Back", "Next"))
    last = explorer.agrees(figure, data)[-1]
    assert forward.get_attribute("aria-disabled") == "true"
    page.keyboard.press("Tab")
    for _ in range(last + 2):
        page.keyboard.press("Enter")  # Back
    assert explorer.agrees(figure, data)[-1] == 0
    assert back.get_attribute("aria-disabled") == "true"
    page.keyboard.press("Tab")  # Play
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # Next
    assert explorer.agrees(figure, data)[-1] == 1
    for _ in range(last + 1):
        page.keyboard.press("Enter")
    assert explorer.agrees(figure, data)[-1] == last
    for control in figure.get_by_role("combobox").all():  # to runs that may be shorter
        control.press("Home")
        explorer.agrees(figure, data)


EACH = f"""(root, all) => all.map((values) => {{
  const controls = [...root.querySelectorAll("select, input")];
  values.forEach((value, i) => {{
    controls[i].value = value;
    controls[i].dispatchEvent(new Event("input", {{ bubbles: true }}));
  }});
  return [({FITS})(root), ({SHOWN})(root)];
}})"""


def test_every_state_shows_pythons_words_and_pictures_and_fits_a_phone(opened):
    explorer, page = opened.explorer, opened.page
    states = [*explorer.states(opened.data), explorer.start]
    page.set_viewport_size(NARROW)
    found = opened.figures[0].evaluate(EACH, [list(map(int, at)) for at in states])
    for at, (narrow, texts) in zip(states, found, strict=True):
        assert explorer.read([*map(html.unescape, texts)]) == explorer.account(opened.data, at), at
        assert narrow, at
    page.set_viewport_size(PHONE)
    assert fits(opened.figures)
