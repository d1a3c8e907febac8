"""What each explorer says and draws, against JAX, compiled programs and counts by hand."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explorers import (
    BLOCKS,
    BOTH,
    BUDGETS,
    INPUTS,
    OUTPUTS,
    PASSES,
    ROWS,
    SHAPE,
    SPLITS,
    START,
    TENSOR,
    WHOLE,
    States,
    balance,
    block,
    lanes,
    layer,
    layouts,
    loads,
    plan,
    products,
    rings,
    saved,
    slices,
    split,
    traced,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import context, mesh, schedules
from shardwise_book import figures
from shardwise_book.figures import pieces, pipelines, ring
from shardwise_book.figures import products as sharded
from shardwise_book.figures import slices as drawn_slices


@pytest.fixture(scope="module", autouse=True)
def eight():
    mesh.simulate(8)


def said(text):
    """The numbers and words that carry names."""
    return dict(re.findall(r'data-name="(\w+)">([^<]*)<', text))


def number(text):
    return int(text.replace(",", ""))


def boxes(path):
    return [tuple(map(float, box)) for box in re.findall(r"M(\S+) (\S+?)h(\S+?)v(\S+?)h", path)]


def area(path):
    return sum(wide * high for _, _, wide, high in boxes(path))


# Meshes


@pytest.fixture(scope="module")
def meshes():
    return States(figures.mesh_explorer())


def test_a_mesh_by_hand(meshes):
    """4×2, P('data', None), 16×8 float32."""
    shown = meshes.labelled(mesh="4×2 (data, model)", columns="8", first="'data'")
    assert said(shown["result"]) == {"block": "4×8", "bytes": "128", "copies": "2"}
    assert shown["memories"].split("device 7")[1].endswith("[12:16, 0:8]</div>")
    assert [re.findall(">(\\d)<", tile) for tile in shown["array"].split("</div><div>")] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
        ["6", "7"],
    ]


def test_what_the_memories_hold_is_what_the_words_count(meshes):
    refused = 0
    for at in meshes.every():
        shown = meshes.shown(**at)
        rows, columns = (int(meshes.options(n)[at[n]]) for n in ("rows", "columns"))
        held = re.findall(r"\[(\d+):(\d+), (\d+):(\d+)\]", shown["memories"])
        if not held:
            assert shown["array"] == "" and "JAX refuses" in shown["result"]
            refused += 1
            continue
        covered = np.zeros((rows, columns), int)
        for top, bottom, left, right in (map(int, one) for one in held):
            covered[top:bottom, left:right] += 1
        assert len(held) == 8 and np.unique(covered).tolist() == [
            int(said(shown["result"])["copies"])
        ]
        assert covered.sum() * 4 == 8 * number(said(shown["result"])["bytes"])
    assert 500 < refused < len(meshes.every()) - 500


def test_refusals_are_jaxs(meshes):
    uneven = meshes.labelled(mesh="4×2 (data, model)", rows="6", columns="8", first="'data'")
    assert re.search(r"partitioned 4 times.*size is 6 .*\(6, 8\).*[\[(]4, 1[\])]", uneven["result"])
    twice = meshes.labelled(mesh="8 (data)", first="'data'", second="'data'")
    assert "duplicate entries for `data`" in twice["result"]


def test_a_mesh_needs_eight_devices(monkeypatch):
    some = mesh.devices()[:4]
    monkeypatch.setattr(mesh, "devices", lambda: some)
    with pytest.raises(RuntimeError, match=r"8 devices and found 4: .*mesh\.simulate\(8\)"):
        figures.mesh_explorer()


# Balance


def test_balance_says_the_work_on_the_critical_path():
    states = States(balance())
    shown = states.shown(devices=1, length=1)["result"]
    assert said(shown) == {"mean": "520", "takes": "904", "waits": "42"}
    assert "4,064 bytes by ring, Ulysses: too few" in shown
    zigzag = said(states.shown(order=1, devices=1, length=1)["result"])
    assert (zigzag["takes"], zigzag["waits"]) == ("520", "0")


def test_balance_draws_what_is_seen_by_whom_and_bars_as_long_as_scores():
    states, orders = States(balance()), (context.contiguous, context.zigzag)
    for at in states.every():
        n, size = (2, 4)[at["devices"]], (16, 64)[at["length"]]
        shown, owners = states.shown(**at), orders[at["order"]](size, n).reshape(n, -1)
        drawn = np.full((size, size), -1)
        for device, path in enumerate(re.findall(r'd="([^"]*)" fill="var', shown["seen"])):
            for first, row, count in re.findall(r"M(\d+) (\d+)h(\d+)v1", path):
                drawn[int(row), int(first) : int(first) + int(count)] = device
            keys = [int(key) for key in re.findall(r"M(\d+) -4", path)]
            assert keys == sorted(owners[device])
            assert set(np.flatnonzero((drawn == device).any(axis=1))) <= set(keys)
        bars = re.findall(r'd="([^"]*)" fill="var', shown["ring"])
        for device, path in enumerate(bars):
            scores = sum(wide for _, _, wide, _ in boxes(path))
            assert scores == (drawn == device).sum()
        if at["mask"] == 0:
            index = np.arange(size)
            np.testing.assert_array_equal(drawn >= 0, index[None] <= index[:, None])


# Two products


def test_words_say_the_blocks_numbers():
    words = sharded.describe_block(BLOCKS[10])
    assert said(words) == {"verdict": "Right.", "sent": "2,304", "held": "2,048"}
    assert "reduce-scatter between, all-reduce at the end" in words


def test_wrong_choices_are_said_to_be_wrong_by_the_measured_error():
    rows_first = BLOCKS[14]  # n = 4, rows, rows
    assert said(sharded.describe_block(rows_first, 1))["error"] == "40%"
    assert said(sharded.describe_block(rows_first, 2))["error"] == "50%"
    assert "Right too" in sharded.describe_block(BLOCKS[10], 1)  # columns first: nothing to sum
    assert "No result" in sharded.describe_block(BLOCKS[8], 2)  # columns last: no y to compare


def test_a_band_for_each_device_a_pile_for_a_sum_and_grey_for_what_is_whole():
    cut = sharded.states("rows", "columns", True)
    assert cut == ("rows", "columns", "rows", "partial", "whole", "columns", "columns", "rows")
    for state in cut:
        fills = re.findall('<rect [^>]*fill="([^"]+)"', sharded.matrix(4, state, "x", 0, 0, 40, 80))
        assert len(set(fills)) == len(fills) == (1 if state == "whole" else 4)


def test_blocks_want_every_combination():
    with pytest.raises(ValueError, match=r"none for \(8, 'rows', 'rows', True\)"):
        figures.block_explorer([*BLOCKS[:-1], block(2, "rows", "rows", True)])


# One layer


@pytest.mark.parametrize(("inputs", "refused"), [(0, 9), (1, 3), (2, 6), (3, 9)])
def test_pieces_are_where_numpy_finds_their_entries(inputs, refused):
    """By specs of an array of three axes; a block that is no interval of its axes is told."""
    grid, shape = mesh.make(a=2, b=2, c=2), (4, 2, 6)
    entries, wide = np.arange(48).reshape(shape), int(np.prod(shape[inputs:]))
    for spec in itertools.product((None, "a", ("a", "b")), (None, "b", "c"), (None, "c")):
        if spec[:2] == (("a", "b"), "b") or spec[1:] == ("c", "c"):  # no spec: an axis cuts twice
            continue
        sharding, boxes, whole = NamedSharding(grid, P(*spec)), [], True
        for at in sharding.devices_indices_map(shape).values():
            rows, columns = np.divmod(entries[at].ravel(), wide)
            boxes.append((rows.min(), rows.max() + 1, columns.min(), columns.max() + 1))
            whole &= np.ptp(rows) + 1 == rows.size / (np.ptp(columns) + 1)
        if whole:
            assert pieces.pieces(sharding, shape, inputs) == boxes
            continue
        with pytest.raises(ValueError, match="is no interval; cut the first of them alone"):
            pieces.pieces(sharding, shape, inputs)
        refused -= 1
    assert refused == 0


def test_pieces_of_an_axis_too_long_to_write_down():
    cut = NamedSharding(mesh.make(a=8), P("a"))
    assert pieces.pieces(cut, (2**45, 2))[1] == (2**42, 2**43, 0, 2)


def bytes_of(specs, device):
    """What JAX puts on a device, of arrays with these specs."""
    grid, total = mesh.make(data=4, model=2), 0
    for row in ROWS.values():
        for name, (shape, _) in row.items():
            shards = NamedSharding(grid, specs[name]).devices_indices_map(shape)
            total += 4 * jnp.zeros(shape)[shards[grid.devices.flat[device]]].size
    return total


def test_a_layer_says_jaxs_own_bytes():
    states, total = States(layer()), bytes_of(WHOLE, 0)
    for device in range(8):
        words = states.shown(layout=1, device=device)["result"]
        held, used = bytes_of(BOTH, device), bytes_of(TENSOR, device)
        expected = {"held": held, "received": used - held, "unseen": total - used}
        assert {name: number(text) for name, text in said(words).items()} == expected
        assert f"device {device} (data {device // 2}, model {device % 2})" in words
    whole, both = states.shown(), states.shown(layout=1)
    assert "receives none" in whole["result"]
    assert whole["sums"] == "" and both["sums"].count("Σ") == 2  # after o and after down
    assert "1,234" in both["sends"] and both["sends"].count("<tr>") == 2


def test_blocks_of_all_devices_tile_each_matrix():
    figure = layer()
    held = [States(figure).shown(layout=1, device=device)["blocks"] for device in range(8)]
    found = sum(area(re.search(r'd="([^"]+)" [^>]*class="held"', one)[1]) for one in held)
    whole = States(figure).shown(layout=0)["blocks"]
    expected = area(re.search(r'd="([^"]+)" [^>]*class="held"', whole)[1])
    assert found == pytest.approx(expected, rel=0.05)


def test_a_block_that_is_no_rectangle_is_an_error():
    cut = TENSOR | {"q": P(None, None, "model")}  # half of each head
    with pytest.raises(ValueError, match=r"axes \(4, 8\) drawn as one.*no interval"):
        layer(layouts={"heads in half": (cut, cut, [])}, chosen=0)


# Loads of experts


def test_loads_count_what_was_routed():
    states = States(loads())
    some = states.shown(skew=1)
    counted = {"choices": "58", "busiest": "19", "dropped": "12", "exchanged": "4,000"}
    assert said(some["result"]) == counted | {"gathered": "10,000", "less": "all-to-all"}
    assert "(20.7 %)" in some["result"]
    dashed = re.findall(r'height="(\d+)" fill="none"', some["loads"])
    assert [high == "0" for high in dashed] == [True, False, False, False]
    free = states.shown(capacity=1)["result"]
    assert said(free)["dropped"] == "0" and said(free)["less"] == "gather"
    assert "no all-to-all of fixed size" in free


# Lanes


def test_lanes_say_what_the_simulation_says():
    states = States(lanes())
    times = 4096 * 4e8 / 4e14, 2 * 4096 * 4e8 / 4e14, 2 * 4e8 / 2e11 * 7 / 8
    run = figures.overlap("data", 1, 4, *times)
    words = states.shown(tokens=1, ahead=1)["result"]
    assert said(words)["step"] == f"{run.step * 1e3:.1f} ms"
    assert said(words)["exposed"].startswith(f"{run.exposed * 1e3:.2f} ms")
    assert "all 4 layers" in words and said(words)["held"] == "3,200 MB"
    ahead = States(lanes("fsdp")).shown(tokens=1, ahead=2)
    assert said(ahead["result"])["whole"] == "3"
    assert ahead["lanes"].count('height="26"') == 4 * 5


# Pipelines


def test_a_pipeline_by_hand():
    """1F1B on four devices: its first backward waits for three more forwards and backwards."""
    states = States(figures.pipeline_explorer())
    shown = states.labelled(schedule="1f1b", devices="4", microbatches="8", backward="2", task="4")
    assert said(shown["result"]) == {"makespan": "33", "bubble": "27.3 %"}
    assert said(shown["live"]) == {"peaks": "4, 3, 2, 1", "pending": "0, 0, 0, 0"}
    first, needs = "B of stage 0, microbatch 0", "F of stage 0, microbatch 0"
    assert f"<b>{first}</b> needs {needs} and B of stage 1, microbatch 0." in shown["story"]
    assert f'[title="{first}"]{{--w:6}}' in shown["costs"]
    few = states.labelled(schedule="zb_h1", devices="4", microbatches="2")
    assert "2 microbatches for 4 stages; it takes 4 or more" in few["result"]
    assert few["rows"] == few["costs"] == few["story"] == ""
    halves = states.labelled(schedule="dualpipe_v", devices="4", microbatches="8", backward="2")
    assert said(halves["result"])["makespan"] == "25.5"
    assert said(halves["live"])["peaks"] == "4.5, 4.5, 4.5, 4.5"


@pytest.mark.parametrize("name", list(schedules.SCHEDULES))
@pytest.mark.parametrize("transfer", [0, 0.5])
def test_boxes_of_their_widths_after_their_waits_end_when_tasks_do(name, transfer):
    run = pipelines.timeline(schedules.spread(name, 4, 8), 3, transfer)
    costs = pipelines._costs(run)
    widths = {kind: float(x) for kind, x in re.findall(r"--([FBIW]):([\d.]+)", costs)}
    waits = {title: float(x) for title, x in re.findall(r'"([^"]+)"\]{--w:([\d.]+)', costs)}
    lanes = list(pipelines._rows(run))
    for order, lane in zip(run.schedule.tasks, lanes, strict=True):
        now, live = 0, dict(run.live[run.schedule.device_of[order[0].stage]])
        drawn = re.findall(r'<i class="(\w).*?--l:(\d+)" title="([^"]+)"', lane)
        for task, (kind, height, title) in zip(order, drawn, strict=True):
            now += waits.get(title, 0)
            assert (now, kind) == (run.start[task], task.kind)
            known = [at for at in live if at <= now]
            assert int(height) == live[max(known)]
            now += widths[kind]
            assert now == run.end[task]


def test_a_new_schedule_is_offered_and_drawn(monkeypatch):
    monkeypatch.setitem(schedules.SCHEDULES, "new_one", schedules.SCHEDULES["gpipe"])
    shown = States(figures.pipeline_explorer()).labelled(
        schedule="new_one", devices="4", microbatches="8"
    )
    assert said(shown["live"])["peaks"] == "8, 8, 8, 8"


# Budgets and splits


def test_a_plan_says_what_fits_and_what_binds():
    states = States(plan())
    fits, full = states.shown(choice1=1), states.shown(choice0=1, choice1=2)
    assert said(fits["result"]) == {
        "held": "13.1",
        "fits": "fits",
        "mfu": "45.7",
        "binds": "arithmetic",
    }
    assert "GiB of 15.8" in fits["result"]
    assert said(full["result"])["held"] == "34.1" and said(full["result"])["binds"] == "tensor"
    assert said(full["result"])["fits"] == "does not fit"
    ends = re.findall(r'x="(\d+)" y="18" width="(\d+)"', full["bars"])  # to the edge, no further
    assert ends == [("4", "322"), ("326", "0"), ("326", "0")]


def test_a_split_says_what_fits_and_what_is_slowest():
    states = States(split())
    fits, full = (states.shown(choice0=a, choice1=b)["result"] for a, b in ((0, 1), (1, 2)))
    assert '"held">60</b> GB, which fits into 80 GB' in fits
    assert "tensor 247 GB, fsdp 7 GB" in fits or "tensor 123 GB, fsdp 7 GB" in fits
    assert '"slowest">fsdp</b>, with 1 s, more than the 0.75 s' in fits
    assert '"held">120</b> GB, which does not fit' in full
    assert '"slowest">tensor</b>, with 0.549 s, less than' in full
    widths = re.findall(r'width="(\d+)"', states.shown(choice0=0, choice1=1)["bars"])
    assert widths == ["242", "88", "322"]


@pytest.mark.parametrize(("make", "found"), [(plan, BUDGETS), (split, SPLITS)])
def test_every_combination_is_there(make, found):
    refused = States(make()).shown(choice1=2)
    assert "asks for 16.</span>" in refused["result"] and refused["bars"] == ""
    with pytest.raises(ValueError, match=r"none for \(1, 0\)"):
        make({"Chips": ["8", "64"], "Tensor": ["1", "2", "8"]},
             {place: x for place, x in found.items() if place != (1, 0)})  # fmt: skip
    with pytest.raises(ValueError, match="is none: 8 "):
        make(chosen=(0, 2))


# Products


def test_names_the_factor_that_the_program_gathered():
    line, seen = mesh.make(model=4), set()
    for product, arrays in products().items():
        (i, j, k), gathered = product.sizes, sharded._gathered(product)
        if gathered is not None:
            factor = [((i, j), product.left), ((j, k), product.right)][gathered]
            assert arrays == [NamedSharding(line, factor[1]).shard_shape(factor[0])]
            assert ["left", "right"][gathered] in sharded.describe_product(product)
        seen.add((product.collective, gathered))
    assert seen == {("", None), ("all-gather", 0), ("all-gather", 1), ("all-reduce", None)}


def paths(svg):
    """[(fill or None, opacity, stroke width, area), ...] of a column."""
    for path in re.findall(r"<path ([^>]*)/?>", svg):
        told = dict(re.findall(r'([\w-]+)="([^"]*)"', path))
        fill = None if told["fill"] == "none" else told["fill"]
        opacity, width = told.get("fill-opacity", "1"), told.get("stroke-width", 1)
        yield fill, float(opacity), float(width), area(told["d"])


def test_draws_what_devices_hold_and_what_comes_to_them():
    line = mesh.make(model=4)
    for product in products():
        (i, j, k), scale = product.sizes, 64 / max(product.sizes)
        gathered, shapes = sharded._gathered(product), ((i, j), (j, k), (i, k))
        for which, column in enumerate(sharded.columns(line, product)):
            drawn = list(paths(column))
            held = NamedSharding(line, product[1 + which]).shard_shape(shapes[which])
            whole, own = (4 * scale**2 * np.prod(size) for size in (shapes[which], held))
            outlines = [a for fill, _, width, a in drawn if not fill and width == 1]
            bold = [a for fill, _, width, a in drawn if not fill and width == 2]
            full = sum(a for fill, opacity, _, a in drawn if fill and opacity == 1)
            np.testing.assert_allclose(outlines[0], whole, rtol=1e-4)
            if which < 2:
                np.testing.assert_allclose(bold[0], own, rtol=1e-4)
            expected = whole if which == gathered else own
            if product.collective == "all-reduce" and which < 2:
                expected = whole / 4  # of the summed axis each
            np.testing.assert_allclose(full, expected, rtol=1e-4)


def test_a_product_says_numbers_and_line_and_escapes_it():
    product = next(p for p in products() if p.collective == "all-reduce")
    words = sharded.describe_product(product)
    assert said(words)["sent"] == f"{product.ring_bytes:,}" and "&lt;&amp;&gt;" in words
    with pytest.raises(ValueError, match=r"product_explorer: .* none for \(\(8, 32, 32\), "):
        figures.product_explorer(mesh.make(model=4), list(products())[:-1])


# Restoring


@pytest.mark.slow
def test_restoring_reads_what_jax_places_and_the_checkpoint_holds():
    states, seen = States(figures.resharding_explorer(layouts(), saved(), *START)), set()
    for at in states.every():
        labels = {n: states.options(n, **at)[at[n]] for n in ("mesh0", "spec0", "mesh1", "spec1")}
        limit = states.options("limit")[at["limit"]]
        chunks = saved()[limit][labels["mesh0"], labels["spec0"]]
        sharding = layouts()[labels["mesh1"]][labels["spec1"]]
        device = sorted(sharding.device_set, key=lambda d: d.id)[at["device"]]
        index = sharding.devices_indices_map(SHAPE)[device]
        shown = states.shown(**at)
        words = "".join(shown[f"{name}_words"] for name in ("source", "goal", "read"))
        told = said(words)
        mine = [chunks.places[number] for number in chunks.touched(index)]
        assert number(told["held"]) == 4 * np.prod(sharding.shard_shape(SHAPE))
        assert number(told["touched"]) == len(mine)
        assert number(told["read"]) == sum(size for *_, size in mine) >= number(told["held"])
        assert number(told["all"]) >= number(told["read"])
        for read, every in (("read", "chunks"), ("read_bytes", "files")):
            assert len(boxes(shown[read])) == len(mine)
            assert len(boxes(shown[every])) == len(chunks.places)
        assert area(shown["chunks"]) >= np.prod(SHAPE)
        seen.add(words.count("bytes "))
    assert len(seen) > 2


# Rings


@pytest.mark.slow
def test_bytes_of_a_ring_are_those_of_the_formula():
    states = States(figures.ring_stepper(rings()))
    for at in states.every():
        n, name = (2, 3, 4, 8)[at["n"]], list(PASSES)[at["kind"]]
        told = said(states.shown(**at)["result"])
        assert number(told["steps"]) == PASSES[name] * (n - 1)
        assert number(told["all"]) * n == PASSES[name] * 840_000 * (n - 1)
        assert number(told["sent"]) == at["step"] * number(told["block"])


def test_moves_are_what_the_permutes_moved():
    """Play the moves on the first state, by hand, and arrive at the last."""
    for name, found in rings().items():
        for n, (history, pairs) in found.items():
            run, held = ring.record(name, history, pairs), history[0].copy()
            for moves, after in zip(run.moves, history[1:], strict=True):
                before = held.copy()
                assert sorted(source for source, *_ in moves) == list(range(n))
                for source, target, slot, count in moves:
                    mark = int(before[source, slot])
                    assert mark.bit_count() == count
                    adds = name in ("reduce", "all-reduce") and after[target, slot] != mark
                    held[target, slot] = mark | (before[target, slot] if adds else 0)
                np.testing.assert_array_equal(held, after, err_msg=f"{name}, {n}")


def test_a_ring_is_drawn_with_a_bar_for_each_block():
    states = States(figures.ring_stepper(rings()))
    drawn = states.labelled(kind="reduce", n="8", step="1")["ring"]
    assert drawn.count('class="block"') == 64 and drawn.count('class="move"') == 8


def test_a_ring_that_does_not_close_is_refused():
    history, pairs = rings()["gather"][4]
    broken = history.copy()
    broken[2, 0] = [0, 0, 8, 0]  # device 0 has another's block, of one that did not send it
    with pytest.raises(ValueError, match=r"reduce on 4 devices, step 1: .*device 3.* held"):
        ring.record("reduce", broken, pairs)


def test_a_name_keeps_its_capitals():
    figure = figures.ring_stepper({"all-Reduce v2": rings()["all-reduce"]})
    assert ">All-Reduce v2</b> on 4 devices" in figure.still


# A traced program


def test_a_slice_lights_what_it_computes_and_outlines_what_it_reads():
    states, found = States(slices()), []
    for i in range(3):
        shown = states.shown(slice=i)["graph"]
        lit, read = (
            re.findall(rf'class="node {state}"[^>]*><title>([^<]*)', shown)
            for state in ("on", "read")
        )
        found.append((lit, read, shown.count('class="edge on"')))
    assert found == [
        (["dot_general", "y"], ["x", "w"], 3),
        (["dot_general", "to x"], ["w", "cotangent"], 3),
        (["dot_general", "transpose", "to w"], ["x", "cotangent"], 4),
    ]
    assert states.shown(slice=2)["result"] == (
        "<b>W</b>: 2 of 4 equations, 1 of them a product of matrices. It reads x, cotangent."
    )


def test_what_another_slice_computed_is_told():
    program = jax.make_jaxpr(lambda x: jnp.cos(jnp.sin(x)))(1.0)
    one, two = program.eqns
    cut = {"F0": [one], "F1": [two]}
    shown = States(figures.slice_graph(program, cut, ["x"], ["y"])).shown(slice=1)
    assert shown["result"].endswith("It reads what F0 computed.")


def test_no_two_boxes_of_a_graph_overlap():
    program, chosen = traced()
    found = drawn_slices.graph(program.jaxpr, list(chosen.values()), INPUTS, OUTPUTS)
    wide, corners = drawn_slices.places(found)
    for (x, y), (other_x, other_y) in itertools.combinations(corners, 2):
        assert abs(x - other_x) > wide or abs(y - other_y) > drawn_slices.HIGH


def test_an_equation_is_in_one_slice():
    program, chosen = traced()
    few = {"I": chosen["I"], "W": chosen["W"]}
    with pytest.raises(ValueError, match="dot_general is in 0 slices, not in one"):
        figures.slice_graph(program, few, INPUTS, OUTPUTS)
    with pytest.raises(ValueError, match="dot_general is in 2 slices"):
        figures.slice_graph(program, chosen | {"B": chosen["I"]}, INPUTS, OUTPUTS)


# Sharded training, and saving, whose simulations have tests of their own


def test_a_step_of_fsdp_by_hand():
    states = States(figures.fsdp_stepper({f"layer {i}": 4096 for i in range(3)}))
    shown = states.shown(zero=3, step=1)
    assert said(shown["result"]) == {
        "step": "1",
        "event": "forward: all-gather, layer 0",
        "held": "13,312",  # three quarters of Ψ, and a layer
        "peak": "19,456",
        "sent": "3,072",
        "all": "27,648",
    }
    assert shown["grid"].count('class="cell"') == 4 * 3 * 3
    # Of layer 0 each device holds four parts of the parameters, and one of everything else.
    assert shown["grid"].count('height="22" fill="var') == 4 * (4 + 2 + 3)


def test_saving_says_the_share_lost():
    given = {"1 s": 1.0}, {"5 s, then 1 min": (5, 60)}, {"20 min": 1200}
    states = States(figures.saving_explorer(*given, 300))
    for at in states.every():
        every, way = states.options("interval"), at["way"]
        paid = (65, 0) if way else (5, 60)
        lost = [100 * figures.share_lost(float(n), *paid, 1200, 300) for n in every]
        told = said(states.shown(**at)["result"])
        assert told["lost"] == f"{lost[at['interval']]:.2f} %"
        assert told["least"] == f"{min(lost):.2f} %"
        assert told["young"] == ("395" if way else "110")
