"""The pipeline explorer, and the still timelines."""

import itertools
import re
from unittest import mock

import pytest
from browser import NAME, PHONE, silent_page, write_page
from explorers import Explorer

from shardwise import schedules
from shardwise_book import figures
from shardwise_book.figures import palette, pipelines, timelines

SIZES = (2, 4), (2, 4, 8)


def choices(data):
    """Everything that the controls can say, each with some device and task."""
    offered = [range(len(values)) for values in data["offered"].values()]
    for number, values in enumerate(itertools.product(*offered)):
        choice = dict(zip(data["offered"], values, strict=True))
        run = pipelines.look(data, choice)
        if isinstance(run, str):
            yield choice | {"device": 0, "task": 0}
            continue
        device = number % run.schedule.devices
        task = number * 7 % len(run.schedule.tasks[device])
        yield choice | {"device": device, "task": task}


def test_the_still_says_the_right_numbers():
    """1F1B on four devices: its first backward waits for three more forwards and backwards."""
    still = figures.pipeline_explorer()._repr_html_().split("<script>")[0]
    said = dict(re.findall(r'data-name="(\w+)">([^<]+)<', still))
    assert said == {
        "makespan": "33",
        "bubble": "27.3 %",
        "peaks": "4, 3, 2, 1",
        "pending": "0, 0, 0, 0",
    }
    assert "<b>B of stage 0, microbatch 0</b> on device 0 runs from 10 to 12." in still
    assert "the device is free from 4 and waits 6." in still
    assert still.count("stroke-dasharray") == 2  # its forward, and the backward of stage 1


def test_stages_share_a_device_s_layers():
    data = pipelines.table(*SIZES)
    choice = data["start"] | {
        "schedule": data["offered"]["schedule"].index("dualpipe_v"),
        "devices": 0,
    }
    assert 'Makespan <b data-name="makespan">24.5' in pipelines.describe(data, choice)
    four = pipelines.table((4,), (8,), {"schedule": "dualpipe_v"})
    assert 'data-name="makespan">25.5<' in pipelines.describe(four, four["start"])
    assert 'data-name="peaks">4.5, 4.5, 4.5, 4.5<' in pipelines.describe(four, four["start"])


def test_what_a_schedule_does_not_take_is_said():
    few = pipelines.table((4,), (2,), {"schedule": "zb_h1", "devices": 4, "microbatches": 2})
    assert "2 microbatches for 4 stages; it takes 4 or more" in pipelines.describe(
        few, few["start"]
    )
    assert pipelines.picture(few, few["start"]) == ""
    start = {"schedule": "zb_h1", "microbatches": 2}
    still = figures.pipeline_explorer((4,), (2,), start)._repr_html_()
    assert "it takes 4 or more.</span></p>" in still


def test_what_cannot_be_offered_is_an_error():
    with pytest.raises(ValueError, match=r"start has devices 3; on offer are \[2, 4\]"):
        figures.pipeline_explorer(*SIZES, {"devices": 3})
    with pytest.raises(ValueError, match="40 microbatches; it numbers 36"):
        figures.pipeline_explorer((4,), (40,), {"microbatches": 40})


def test_a_new_schedule_is_offered_and_drawn(monkeypatch):
    monkeypatch.setitem(schedules.SCHEDULES, "new_one", schedules.SCHEDULES["gpipe"])
    text = figures.pipeline_explorer(start={"schedule": "new_one"})._repr_html_()
    assert "<option" in text and ">new_one</option>" in text
    assert 'data-name="peaks">8, 8, 8, 8<' in text


# The still timelines


def boxes(drawing):
    found = [p for p in drawing.axes[0].patches if p.get_height() > 0.5 and p.get_alpha() is None]
    return [p for p in found if p.get_facecolor()[3] == 1]


@pytest.mark.parametrize("name", list(schedules.SCHEDULES))
def test_timelines_show_every_task_where_it_runs(name):
    run = schedules.timeline(schedules.spread(name, 2, 4), transfer=0.5)
    drawn = boxes(figures.schedule(run))
    assert len(drawn) == len(run.start)
    for (task, start), box in zip(run.start.items(), sorted_like(run, drawn), strict=True):
        device = run.schedule.device_of[task.stage]
        assert (box.get_x(), int(box.get_y())) == (start, 1 + device)
        assert 0.8 * (run.end[task] - start) < box.get_width() <= run.end[task] - start


def sorted_like(run, drawn):
    """The boxes in the order of `run.start`; they are drawn device by device."""
    order = [task for tasks in run.schedule.tasks for task in tasks]
    return [drawn[order.index(task)] for task in run.start]


def test_numbers_stand_in_their_boxes():
    run = schedules.timeline(schedules.spread("1f1b", 2, 4))
    axes = figures.schedule(run).axes[0]
    numbers = sorted((*t.get_position(), t.get_text()) for t in axes.texts if t.get_text())
    expected = sorted(
        ((start + run.end[task]) / 2, 1.53 + task.stage, str(task.microbatch))
        for task, start in run.start.items()
    )
    assert numbers == expected


def test_timelines_share_one_axis_and_name_kinds_that_occur():
    runs = {name: schedules.spread(name, 2, 4) for name in ("gpipe", "zb_h1")}
    axes = figures.schedule(runs).axes[0]
    assert {text.get_text() for text in axes.texts} >= {"gpipe", "zb_h1", "0", "3"}
    kinds = [text.get_text()[0] for text in axes.get_legend().get_texts()]
    assert kinds == ["F", "B", "I", "W"]
    one = figures.schedule(runs["gpipe"]).axes[0].get_legend().get_texts()
    assert [text.get_text() for text in one] == ["F forward", "B backward"]


def test_kinds_differ_in_grey_and_carry_readable_numbers():
    grey = sorted(palette.luminance(colour) for colour in timelines.COLOURS.values())
    assert all(b - a > 0.08 for a, b in itertools.pairwise(grey))
    for colour in timelines.COLOURS.values():
        assert palette.contrast(palette.ink(colour), colour) > 4.5


# In the browser


def expected(data, at):
    choice = dict(zip(pipelines.START, at, strict=True))
    return [pipelines.describe(data, choice), pipelines.picture(data, choice)]


def named():
    """A schedule of the reader's own, which refuses, and says so."""

    def refuse(stages, devices, microbatches):
        raise ValueError(f"{NAME} wants more")

    with mock.patch.dict(schedules.SCHEDULES, {NAME: refuse}):
        return figures.pipeline_explorer(start={"schedule": NAME})


EXPLORER = Explorer(
    lambda: figures.pipeline_explorer(*SIZES),
    start=[1, 1, 2, 2, 0, 0, 4],
    controls={
        "Schedule": len(schedules.SCHEDULES),
        "Devices": 2,
        "Microbatches": 3,
        "Backward costs": 4,
        "Transfer takes": 4,
        "Device": 4,
        "Task": 36,  # of the last device, under the last schedule
    },
    states=lambda data: [[*choice.values()] for choice in choices(data)],
    expected=expected,
    bytes=100_000,
    ids=10,
    named=named,
    told=lambda words: NAME in words,
)


def test_every_choice_is_tried():
    every = EXPLORER.states(EXPLORER.figure().data)
    assert len(every) == len(schedules.SCHEDULES) * 2 * 3 * 4 * 4


def test_the_pointer_chooses_a_task_and_a_shorter_order_keeps_its_last(browser, tmp_path):
    made = EXPLORER.figure()
    with silent_page(browser, viewport=PHONE | {"width": 360}, has_touch=True) as page:
        page.goto(write_page(tmp_path, made))
        figure = page.locator(".shardwise-figure")

        def picked():
            return tuple(EXPLORER.agrees(figure, made.data)[-2:])

        def choose(name, option):
            figure.get_by_role("combobox", name=name, exact=True).select_option(label=option)

        figure.locator('rect[data-device="2"][data-task="9"]').hover()
        assert picked() == (2, 9)
        assert "on device 2 runs from" in figure.get_by_role("status").inner_text()
        figure.locator('rect[data-device="1"][data-task="15"]').click()
        assert picked() == (1, 15)
        page.mouse.move(0, 0)  # or it points at what is drawn next
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
        figure.locator('rect[data-device="3"][data-task="20"]').tap()
        assert picked() == (3, 20)


# What is live over time


def test_live_activations_fill_each_row_as_high_as_its_peak():
    """1F1B and ZB-V on two devices: 2 and 1 whole microbatches, and two on each in halves."""
    runs = {name: schedules.timeline(schedules.spread(name, 2, 4)) for name in ("1f1b", "zb_v")}
    drawing = figures.live_activations(runs)
    said = [[text.get_text() for text in axes.texts] for axes in drawing.axes]
    assert said == [["2", "1"], ["2", "2"]]
    for axes, run in zip(drawing.axes, runs.values(), strict=True):
        for row, (device, area) in enumerate(zip(run.live, axes.collections, strict=True)):
            foot = 1.25 * (row + 1)
            drawn = {round(foot - y, 6) for _, y in area.get_paths()[0].vertices}
            share = run.schedule.devices / run.schedule.stages
            assert drawn == {round(count * share / 2, 6) for _, count in device} | {0}
