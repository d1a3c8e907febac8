"""The figure of splits on paper: its numbers and words, the browser against Python."""

import itertools

import pytest
from browser import NAME, check_names_are_text, check_stands_alone, silent_page, write_page

from shardwise import figures
from shardwise.figures import Load, splits

CHOICES = {"Devices": ["8", "64"], "Tensor": ["1", "2", "8"]}
ROOM = 80e9


def load(devices, tensor):
    if (devices, tensor) == (0, 2):
        return "8 devices, and <tensor> asks for 16."
    sent = {"tensor": (tensor * 123.456e9, 0.2744 * tensor), "fsdp": (7e9, 1 / (1 + devices))}
    return Load(60e9 * (1 + devices), 0.75, sent)


LOADS = {place: load(*place) for place in itertools.product(range(2), range(3))}


def figure(choices=CHOICES, loads=LOADS, chosen=(0, 1)):
    return figures.split_explorer(choices, loads, chosen, ROOM)


def test_words_say_what_fits_and_what_is_slowest():
    fits, full = (figure(chosen=place).still for place in ((0, 1), (1, 2)))
    assert '"held">60</b> GB, which fits into 80 GB' in fits
    assert "tensor 123 GB, fsdp 7 GB" in fits
    assert '"slowest">fsdp</b>, with 1 s, more than the 0.75 s' in fits
    assert '"held">120</b> GB, which does not fit' in full
    assert '"slowest">tensor</b>, with 0.549 s, less than' in full


def test_every_combination_is_there():
    frames = splits.table(CHOICES, LOADS, ROOM)["frames"]
    assert len(frames) == 6 and frames[2] == LOADS[0, 2]
    assert frames[4] == [120, 0.75, 123, 0.274, 7, 0.5]
    with pytest.raises(ValueError, match=r"no load for \(1, 0\)"):
        figure(loads={place: x for place, x in LOADS.items() if place != (1, 0)})
    with pytest.raises(ValueError, match="is no split: 8 devices"):
        figure(chosen=(0, 2))


def test_is_small_fetches_nothing_and_may_stand_twice_on_a_page():
    check_stands_alone(figure()._repr_html_(), figure()._repr_html_(), 20_000, ids=10)


def test_every_choice_shows_what_python_would_draw(browser, tmp_path):
    place = write_page(tmp_path, figure())
    with silent_page(browser, viewport={"width": 360, "height": 800}) as page:
        page.goto(place)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        for at, told in LOADS.items():
            for control, option in zip(page.get_by_role("combobox").all(), at, strict=True):
                control.select_option(index=option)
            said = page.get_by_role("status")
            if isinstance(told, str):
                assert said.inner_text() == told
                continue
            assert said.inner_html() == splits._words(told, ROOM)
            widths = [bar.get_attribute("width") for bar in page.locator("rect").all()]
            drawn = splits._bars(["compute", *told.axes], splits._seconds(told))
            assert all(f'width="{float(width)}"' in drawn for width in widths)


def test_names_are_text(browser, tmp_path):
    named = {(0,): Load(1e9, 1, {NAME: (1e9, 2)}), (1,): NAME}
    shown = figure({NAME: [NAME, NAME]}, named, (0,))
    for inside in check_names_are_text(browser, tmp_path, shown):
        assert NAME in inside.get_by_role("status").inner_text()
