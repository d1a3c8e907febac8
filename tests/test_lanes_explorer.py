"""The lanes of compute and network: the laws of the simulation."""

import itertools

import pytest
from browser import NAME, PHONE, silent_page, write_page
from explorers import Explorer

from shardwise_book import figures
from shardwise_book.figures import lanes

LAYERS, FORWARD, BACKWARD = 5, 1.0, 2.0
WAYS = [("data", 0), ("data", 1), ("fsdp", 0), ("fsdp", 1), ("fsdp", 2)]


def run(strategy, ahead, message, layers=LAYERS):
    """A step whose messages all take as long; an all-reduce sends twice what a gather does."""
    reduce = message * (2 if strategy == "data" else 1)
    return figures.overlap(strategy, ahead, layers, FORWARD, BACKWARD, reduce, gather=message)


@pytest.mark.parametrize(("strategy", "ahead"), WAYS)
@pytest.mark.parametrize("message", [0.0, 0.3, 1.0, 1.7, 6.0])
@pytest.mark.parametrize("layers", [1, 2, LAYERS])
def test_a_step_is_never_shorter_than_either_lane(strategy, ahead, message, layers):
    found = run(strategy, ahead, message, layers)
    assert found.compute == pytest.approx(layers * (FORWARD + BACKWARD))
    assert found.network == pytest.approx(layers * message * (2 if strategy == "data" else 3))
    assert found.step >= max(found.compute, found.network) - 1e-9
    assert found.exposed == pytest.approx(0) or message
    for lane in found.passes, sorted(found.messages, key=lambda task: task.start):
        for before, after in itertools.pairwise(lane):
            assert after.start >= before.end - 1e-9


@pytest.mark.parametrize("message", [0.5, 1.0, 4.0])
def test_without_overlap_every_message_is_waited_for(message):
    assert run("data", 0, message).exposed == pytest.approx(LAYERS * 2 * message)
    alone = run("fsdp", 0, message)
    forward = alone.passes[LAYERS - 1].end  # no gradient travels yet
    assert forward == pytest.approx(LAYERS * (FORWARD + message))
    assert alone.whole == 1
    hidden = run("fsdp", 0, 0.5)  # each reduce-scatter fits behind a backward pass, but the last
    assert hidden.exposed == pytest.approx(2 * LAYERS * 0.5 + 0.5)


def test_messages_hide_where_compute_is_longer():
    """Only what has nothing to hide behind is waited for: the first gather, the last reduction."""
    assert run("data", 1, 1.0).exposed == pytest.approx(2.0)
    assert run("fsdp", 1, 1.0).exposed == pytest.approx(1.0 + 1.0)
    assert run("data", 1, 1.2).exposed > 2.4


@pytest.mark.parametrize("message", [0.5, 1.0, 2.0])
def test_looking_further_ahead_holds_more_and_waits_no_longer(message):
    runs = [run("fsdp", ahead, message) for ahead in (0, 1, 2)]
    assert [r.whole for r in runs][:2] == [1, 2] and runs[2].whole <= 3
    assert runs[0].exposed > runs[1].exposed >= runs[2].exposed - 1e-9
    for r, ahead in zip(runs, (0, 1, 2), strict=True):
        gathers, uses = r.messages, r.passes
        for place in range(ahead + 1, 2 * LAYERS):  # room first, then a gather
            assert gathers[place].start >= uses[place - ahead - 1].end - 1e-9
            assert gathers[place].end <= uses[place].start + 1e-9


def test_errors_are_named():
    with pytest.raises(ValueError, match="strategy='zero', layers=2, ahead=0; expected one of"):
        figures.overlap("zero", 0, 2, 1, 2, 1)


# The figure


def explorer(bandwidths=None, **changes):
    links = bandwidths or {"a ring": 2e11, "a slow network": 1e10}
    chip = {"flops_per_s": 4e14, "bandwidths": links, "devices": 8, "tokens": (1024, 4096)}
    return figures.lanes_explorer(4e8, 4e8, **chip, **changes)


def test_still_says_what_the_simulation_says():
    figure = explorer()
    times = 4096 * 4e8 / 4e14, 2 * 4096 * 4e8 / 4e14, 2 * 4e8 / 2e11 * 7 / 8
    expected = figures.overlap("data", 1, 4, *times)
    said = lanes.describe(figure.data, figure.data["start"])
    assert f'data-name="step">{expected.step * 1e3:.1f} ms' in said
    assert f'data-name="exposed">{expected.exposed * 1e3:.2f} ms' in said
    assert "all 4 layers" in said and "3,200 MB" in said
    assert said in figure._repr_html_()
    fsdp = lanes.describe(figure.data, figure.data["start"] | {"strategy": 1, "ahead": 2})
    assert 'data-name="whole">3</b> of 4 layers' in fsdp


def states(data):
    for strategy, kind in enumerate(data["strategies"]):
        for more in itertools.product(range(2), range(2), range(len(kind["ahead"]))):
            yield strategy, *more


def expected(data, at):
    choice = dict(zip(("strategy", "tokens", "bandwidth", "ahead"), at, strict=True))
    return [draw(data, choice) for draw in (lanes.describe, lanes.picture)]


EXPLORER = Explorer(
    explorer,
    start=[0, 1, 0, 1],
    controls={"Strategy": 2, "Tokens on each device": 2, "Bandwidth": 2, "Overlap": 3},
    states=lambda data: [*states(data)],
    expected=expected,
    bytes=60_000,
    ids=7,
    named=lambda: explorer({NAME: 1e11}),
)


def test_a_strategy_alone_is_no_choice(browser, tmp_path):
    with silent_page(browser, viewport=PHONE) as page:
        page.goto(write_page(tmp_path, explorer(strategies=("fsdp",), start={"ahead": 2})))
        figure = page.locator(".shardwise-figure")
        assert figure.get_by_role("combobox").count() == 3
        assert "At most 3 of 4 layers" in figure.get_by_role("status").inner_text()
