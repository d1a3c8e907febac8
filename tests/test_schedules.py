"""Schedules against the published figures, formulas, and properties over random parameters."""

import dataclasses
import functools
import graphlib
import itertools
import random
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import IN_FULL

from shardwise.schedules import SCHEDULES, Task, check, from_tasks, spread, timeline
from shardwise.schedules.table import run_order

everywhere = pytest.mark.parametrize("name", list(SCHEDULES))
quickly = settings(max_examples=50)
times = st.integers(1, 9)
kinds = st.fixed_dictionaries({kind: times for kind in "FBIW"})


@functools.cache
def served(most_devices=5, most_microbatches=17 if IN_FULL else 13, name=None):
    """Every (name, schedule) that the functions in SCHEDULES give, rather than refuse."""
    names, found = [name] if name else list(SCHEDULES), []
    counts = itertools.product(range(1, most_devices + 1), (1, 2, 3), range(1, most_microbatches))
    for (devices, per_device, microbatches), each in itertools.product(counts, names):
        try:
            found.append((each, SCHEDULES[each](devices * per_device, devices, microbatches)))
        except ValueError:
            continue
    return found


any_schedule = st.sampled_from([schedule for _, schedule in served(4, 10)])


def short(order):
    return " ".join(f"{kind}{stage}_{microbatch}" for stage, kind, microbatch in order)


def shuffled(stages, devices, microbatches, seed):
    """Lists of tasks in a random order that can run, stages dealt to devices at random."""
    draw = random.Random(seed)
    homes = [*range(devices), *(draw.randrange(devices) for _ in range(stages - devices))]
    draw.shuffle(homes)
    tasks = [Task(s, "F", k) for s in range(stages) for k in range(microbatches)]
    for forward in tasks[:]:
        kinds = draw.choice(["B", "IW"])
        tasks += [forward._replace(kind=kind) for kind in kinds]
    whole = from_tasks([tasks])
    orders, done = [[] for _ in range(devices)], set()
    while tasks:
        ready = [task for task in tasks if done.issuperset(whole.dependencies(task))]
        task = draw.choice(ready)
        tasks.remove(task)
        done.add(task)
        orders[homes[task.stage]].append(task)
    return orders


random_orders = st.builds(
    lambda devices, more, microbatches, seed: shuffled(devices + more, devices, microbatches, seed),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 10**6),
)
any_table = st.one_of(any_schedule, random_orders.map(from_tasks))


# Figures and orders that were published


@pytest.mark.parametrize(
    "name, stages, bubble, peaks",
    [
        ("gpipe", 4, 0.2727, (8, 8, 8, 8)),
        ("1f1b", 4, 0.2727, (4, 3, 2, 1)),
        ("eager_1f1b", 4, 0.2727, (7, 5, 3, 1)),
        ("interleaved_1f1b", 8, 0.1579, (11, 9, 7, 5)),
        ("kimi_k2", 8, 0.1579, (12, 10, 8, 6)),
        ("zb_h1", 4, 0.1111, (4, 4, 4, 4)),
        ("zb_h2", 4, 0.1111, (7, 7, 7, 7)),
        ("zb_v", 8, 0.0588, (8, 8, 8, 8)),
        ("dualpipe_v", 8, 0.0588, (9, 9, 9, 9)),
    ],
)
def test_bubbles_and_peaks_of_four_devices_and_eight_microbatches(name, stages, bubble, peaks):
    run = timeline(SCHEDULES[name](stages, 4, 8), {"F": 1, "B": 2, "I": 1, "W": 1})
    assert round(run.bubble, 4) == bubble
    assert run.peak_live == peaks


def test_the_orders_of_interleaved_1f1b():
    four = SCHEDULES["interleaved_1f1b"](4, 4, 4)
    assert short(four.tasks[2]) == "F2_0 F2_1 F2_2 B2_0 F2_3 B2_1 B2_2 B2_3"
    eight = SCHEDULES["interleaved_1f1b"](8, 4, 4)
    first = [f"{kind}_{k}" for kind in ("F0", "F4", "B4", "B0") for k in range(4)]
    assert short(eight.tasks[0]) == " ".join(first)
    last = [f"F3_{k}" for k in range(4)]
    last += [f"{kind}_{k}" for k in range(4) for kind in ("F7", "B7")]
    last += [f"B3_{k}" for k in range(4)]
    assert short(eight.tasks[3]) == " ".join(last)
    assert eight.device_of == (0, 1, 2, 3, 0, 1, 2, 3)


def test_the_orders_of_the_zero_bubble_schedules():
    h1, h2 = SCHEDULES["zb_h1"](3, 3, 4), SCHEDULES["zb_h2"](3, 3, 6)
    assert short(h1.tasks[0]) == "F0_0 F0_1 F0_2 I0_0 W0_0 F0_3 I0_1 W0_1 I0_2 W0_2 I0_3 W0_3"
    assert short(h1.tasks[2]) == "F2_0 I2_0 F2_1 I2_1 F2_2 I2_2 W2_0 F2_3 I2_3 W2_1 W2_2 W2_3"
    assert short(h2.tasks[1])[:44] == "F1_0 F1_1 F1_2 I1_0 F1_3 I1_1 F1_4 I1_2 W1_0"


def v_shaped(orders):
    """Lists of tasks on a V from text: a kind and a microbatch, small letters on the way up."""
    up = 2 * len(orders) - 1
    return [
        [
            Task(device if step[0].isupper() else up - device, step[0].upper(), int(step[1:]))
            for step in order.split()
        ]
        for device, order in enumerate(orders)
    ]


def test_the_order_of_dualpipe_v_is_the_one_that_its_authors_draw():
    """Read off the picture in their README, of four devices and ten microbatches."""
    drawn = [
        "F0 F1 F2 F3 F4 F5 F6 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 F7 b3 f4 B0 F8 b4 f5 B1 F9 b5 f6 B2 "
        "b6 f7 B3 b7 f8 B4 b8 f9 B5 b9 I6 W6 I7 W7 I8 W8 I9 W9",
        "F0 F1 F2 F3 F4 f0 F5 f1 i0 w0 f2 i1 w1 f3 F6 b2 f4 B0 F7 b3 f5 B1 F8 b4 f6 B2 F9 b5 "
        "f7 B3 b6 f8 B4 b7 f9 B5 b8 B6 i9 I7 w9 I8 W7 I9 W8 W9",
        "F0 F1 F2 f0 F3 f1 F4 f2 i0 w0 f3 F5 b1 f4 B0 F6 b2 f5 B1 F7 b3 f6 B2 F8 b4 f7 B3 F9 b5 "
        "f8 B4 b6 f9 B5 b7 B6 b8 I7 i9 I8 W7 I9 w9 W8 W9",
        "F0 f0 F1 f1 F2 f2 F3 f3 F4 b0 f4 B0 F5 b1 f5 B1 F6 b2 f6 B2 F7 b3 f7 B3 F8 b4 f8 B4 F9 "
        "b5 f9 B5 b6 B6 b7 B7 i8 I8 i9 I9 w8 W8 w9 W9",
    ]
    assert SCHEDULES["dualpipe_v"](8, 4, 10) == from_tasks(v_shaped(drawn))


def test_the_order_of_zb_v_and_its_fold():
    schedule = SCHEDULES["zb_v"](4, 2, 4)
    assert schedule.device_of == (0, 1, 1, 0)
    drawn = [
        "F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3",
        "F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3",
    ]
    assert schedule == from_tasks(v_shaped(drawn))


@everywhere
def test_every_schedule_says_where_it_was_published(name):
    assert re.search(r"\([A-Z].*, 20\d\d\b|https://", SCHEDULES[name].__doc__, re.DOTALL)


# Formulas of the papers


@quickly
@given(st.integers(1, 8), st.integers(1, 40), kinds)
def test_gpipe_and_1f1b_wait_as_their_papers_say(p, m, costs):
    for name in "gpipe", "1f1b", "eager_1f1b":
        run = timeline(SCHEDULES[name](p, p, m), costs)
        assert run.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert max(run.gaps) == (p - 1) * (costs["F"] + costs["B"])


@quickly
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), kinds)
def test_interleaving_divides_the_bubble_by_the_stages_on_a_device(p, v, rounds, costs):
    m = rounds * p
    run = timeline(SCHEDULES["interleaved_1f1b"](v * p, p, m), costs)
    ideal = v * m * (costs["F"] + costs["B"])
    assert run.makespan / ideal - 1 == pytest.approx((p - 1) / (v * m))


@quickly
@given(st.integers(1, 7), st.integers(0, 20), times, times, times)
def test_zero_bubble_waits_as_qi_et_al_say(p, more, forward, to_input, to_weights):
    to_weights = min(to_weights, forward)  # as where the formulas hold
    costs = {"F": forward, "B": to_input + to_weights, "I": to_input, "W": to_weights}
    m = 2 * p - 1 + more
    gaps = {name: max(timeline(spread(name, p, m), costs).gaps) for name in ("zb_h1", "zb_h2")}
    gaps["1f1b"] = max(timeline(SCHEDULES["1f1b"](p, p, m), costs).gaps)
    assert gaps == {
        "1f1b": (p - 1) * (forward + to_input + to_weights),
        "zb_h1": (p - 1) * (forward + to_input - to_weights),
        "zb_h2": (p - 1) * max(0, forward + to_input - 2 * to_weights),
    }


@pytest.mark.parametrize("p", range(1, 9))
def test_zb_v_has_no_gap_in_1f1b_s_memory(p):
    """Bubble 0 and peak p of whole devices, where F, I and W cost the same (Qi et al.)."""
    whole = timeline(SCHEDULES["1f1b"](p, p, 2 * p)).peak_live[0]
    for m in range(2 * p, 4 * p + 1):
        run = timeline(SCHEDULES["zb_v"](2 * p, p, m))
        assert run.gaps == (0,) * p and run.makespan == 6 * m + p - 1
        assert {peak / 2 for peak in run.peak_live} == {whole} == {p}


def overlapped(schedule, costs, together):
    """The makespan if an F and the B after it run as one, which takes `together`.

    Both wait until both can start, and both end at the end; as DeepSeek runs DualPipeV, but for
    the first B on the device of the fold, where overlapping costs more than it saves.
    """
    end, free = {}, [0] * schedule.devices
    left = [list(order) for order in schedule.tasks]
    first = Task(schedule.devices, "B", 0)
    while any(left):
        for device, order in enumerate(left):
            fused = [task.kind for task in order[:2]] == ["F", "B"] and order[1] != first
            block = order[: 1 + fused]
            needs = {need for task in block for need in schedule.dependencies(task)} - {*block}
            if block and needs <= end.keys():
                cost = together if fused else costs[block[0].kind]
                free[device] = max([free[device], *(end[need] for need in needs)]) + cost
                end |= dict.fromkeys(block, free[device])
                del order[: len(block)]
    return max(end.values())


@quickly
@given(st.integers(1, 8), st.integers(0, 9), times, times)
def test_dualpipe_v_waits_as_its_authors_say(p, more, whole, to_weights):
    """(PP/2 - 1)(F&B + B - 3W) for PP stages; F&B is what an F and a B take that run as one.

    With one task at a time, an I reaches the next stage sooner, and p - 1 times F + I - W are gaps.
    """
    to_weights, m = min(to_weights, whole), 2 * p + more
    costs = {"F": whole, "B": whole + to_weights, "I": whole, "W": to_weights}
    schedule = SCHEDULES["dualpipe_v"](2 * p, p, m)
    work, together = 2 * m * (costs["F"] + costs["B"]), costs["F"] + costs["B"]
    formula = (p - 1) * (together + costs["B"] - 3 * costs["W"])
    assert overlapped(schedule, costs, together) - work == formula
    assert timeline(schedule, costs).makespan - work == (p - 1) * (2 * whole - to_weights)


def by_jaxpp(device, p, m):
    """DualPipeV as JaxPP orders it: all backwards split, and the W that wait run last of all."""
    after, upto, stages = p - 1 - device, device + 1, (device, 2 * p - 1 - device)
    late = ["i", "I", "W"] if device % 2 else ["i", "w", "I"]
    steps = ["F"] * 2 * after + ["F", "f"] * upto + ["i", "w", "f"] * after
    steps += ["F", "i", "w", "f", "I", "W"] * (m - 2 * p + upto) + ["i", "w", "f", "I", "W"] * after
    if device:
        steps += ["i", "w", "I", "W"] * (upto // 2) + late * (upto - upto // 2) + ["I"] * after
    else:
        steps += ["i", "w", "I", "W"] + ["I", "W"] * after
    numbers = {step: itertools.count() for step in "FfIiWw"}
    order = [Task(stages[step.islower()], step.upper(), next(numbers[step])) for step in steps]
    weights = {task._replace(kind="W") for task in order if task.kind == "I"} - {*order}
    return order + sorted(weights, key=lambda task: (task.microbatch, task.stage))


def test_dualpipe_v_waits_half_as_long_as_in_the_order_of_jaxpp():
    four = timeline([by_jaxpp(device, 4, 8) for device in range(4)])
    assert round(four.bubble, 4) == 0.0943 and four.peak_live == (9,) * 4
    spans = [timeline([by_jaxpp(device, 8, 16) for device in range(8)]).makespan]
    spans += [timeline(SCHEDULES["dualpipe_v"](16, 8, 16)).makespan]
    assert [span - 6 * 16 for span in spans] == [15, 7]


# Memory and counts of each paper


def published_peak(name, p, m, v, after):
    """What a device with `after` others behind it may hold; all there is for a name not listed."""
    round_before = (v - 1) * (m // max(1, m // p))
    bounds = {
        "1f1b": after + 1,
        "eager_1f1b": 2 * after + 1,
        "interleaved_1f1b": round_before + 2 * after + 1,
        "kimi_k2": round_before + 2 * after + 2,
        "zb_h1": p,
        "zb_h2": 2 * p - 1,
        "zb_v": 2 * p,
        "dualpipe_v": 2 * p + 1,
    }
    return min(bounds.get(name, m * v), m * v)


@everywhere
def test_each_device_holds_what_the_paper_says(name):
    for _, schedule in served(name=name):
        p, m, v = schedule.devices, schedule.microbatches, schedule.stages // schedule.devices
        expected = tuple(published_peak(name, p, m, v, p - 1 - device) for device in range(p))
        for costs in {"F": 1, "B": 2, "I": 1, "W": 1}, {"F": 3, "B": 7, "I": 4, "W": 2}:
            found = timeline(schedule, costs).peak_live
            assert found == expected, schedule


@pytest.mark.parametrize(
    "name, warmup",
    [
        ("gpipe", lambda p, m, v, after: m),
        ("1f1b", lambda p, m, v, after: after),
        ("eager_1f1b", lambda p, m, v, after: 2 * after),
        ("interleaved_1f1b", lambda p, m, v, after: (v - 1) * m // max(1, m // p) + 2 * after),
        ("kimi_k2", lambda p, m, v, after: (v - 1) * m // max(1, m // p) + 2 * after + 1),
    ],
)
def test_warm_up_steady_state_and_cool_down(name, warmup):
    for _, schedule in served(name=name):
        p, m, v = schedule.devices, schedule.microbatches, schedule.stages // schedule.devices
        for device, order in enumerate(schedule.tasks):
            ahead = min(warmup(p, m, v, p - 1 - device), m * v)
            kinds = "".join(task.kind for task in order)
            assert kinds == "F" * ahead + "FB" * (m * v - ahead) + "B" * ahead


@pytest.mark.parametrize("name, depth", [("zb_h1", 1), ("zb_h2", 2)])
def test_zero_bubble_warms_up_to_the_same_number_everywhere(name, depth):
    for _, schedule in served(name=name):
        p, m = schedule.devices, schedule.microbatches
        most = min(depth * (p - 1) + 1, m)
        for stage, order in enumerate(schedule.tasks):
            ahead = min(depth * (p - 1 - stage) + 1, m)
            kinds = "".join(task.kind for task in order)
            assert kinds.startswith("F" * ahead + "IF" * (most - ahead) + "IWF" * (m - most))


# Properties of every schedule


@everywhere
def test_every_device_does_its_own_work_once(name):
    count = 0
    for _, schedule in served(name=name):
        check(schedule)
        work = [set() for _ in range(schedule.devices)]
        for device, order in enumerate(schedule.tasks):
            for stage, kind, k in order:
                assert schedule.device_of[stage] == device
                for part in {"F": "F", "B": "IW"}.get(kind, kind):
                    assert (stage, part, k) not in work[device]
                    work[device].add((stage, part, k))
        assert sum(map(len, work)) == 3 * schedule.stages * schedule.microbatches
        count += 1
    assert count > 20


@everywhere
def test_microbatches_keep_their_order(name):
    """Nothing in a stage overtakes: what a stage receives first it runs first."""
    for _, schedule in served(name=name):
        for stage, kind in itertools.product(range(schedule.stages), "FBIW"):
            order = schedule.tasks[schedule.device_of[stage]]
            numbers = [task.microbatch for task in order if task[:2] == (stage, kind)]
            assert numbers == sorted(numbers)


def by_relaxation(schedule, costs, transfer):
    """Start times by raising each until nothing is too early: slow, and written differently."""
    start = {task: 0 for order in schedule.tasks for task in order}
    for _ in range(len(start) + 1):
        before = dict(start)
        for device, order in enumerate(schedule.tasks):
            for position, task in enumerate(order):
                needs = [(order[position - 1], 0)] if position else []
                for need in schedule.dependencies(task):
                    needs.append((need, 0 if need in order else transfer))
                for need, wait in needs:
                    start[task] = max(start[task], start[need] + costs[need.kind] + wait)
                assert schedule.device_of[task.stage] == device
        if before == start:
            return start
    raise AssertionError("no end")


@quickly
@given(any_table, kinds, st.integers(0, 5))
def test_tasks_start_as_early_as_they_can(schedule, costs, transfer):
    run = timeline(schedule, costs, transfer)
    assert run.start == by_relaxation(schedule, costs, transfer)
    assert all(run.end[task] == run.start[task] + costs[task.kind] for task in run.start)
    assert run.makespan == max(run.end.values())


@quickly
@given(any_table, kinds, st.integers(0, 5))
def test_no_schedule_beats_the_dependency_bound(schedule, costs, transfer):
    """The longest chain of one microbatch; and a device's work after its first task's arrival."""
    run = timeline(schedule, costs, transfer)
    ends = {}
    graph = {task: schedule.dependencies(task) for order in schedule.tasks for task in order}
    arrival = {}
    for task in graphlib.TopologicalSorter(graph).static_order():
        home = schedule.device_of[task.stage]
        waits = [transfer * (schedule.device_of[need.stage] != home) for need in graph[task]]
        arrivals = [ends[need] + wait for need, wait in zip(graph[task], waits, strict=True)]
        arrival[task] = max(arrivals, default=0)
        ends[task] = arrival[task] + costs[task.kind]
    assert run.makespan >= max(ends.values())
    for order in schedule.tasks:
        work = sum(costs[task.kind] for task in order)
        assert run.makespan >= min(arrival[task] for task in order) + work
    assert 0 <= run.bubble < 1 and min(run.gaps) >= 0


@quickly
@given(any_table, kinds, st.integers(0, 5), st.integers(2, 50))
def test_scaling_all_times_scales_the_makespan(schedule, costs, transfer, factor):
    run = timeline(schedule, costs, transfer)
    longer = timeline(
        schedule, {kind: factor * cost for kind, cost in costs.items()}, factor * transfer
    )
    assert longer.makespan == factor * run.makespan
    assert longer.bubble == pytest.approx(run.bubble)
    assert longer.peak_live == run.peak_live


@quickly
@given(any_table, kinds, st.integers(0, 5))
def test_peaks_are_those_of_counting_at_every_moment(schedule, costs, transfer):
    run = timeline(schedule, costs, transfer)
    moments = sorted({*run.start.values(), *run.end.values()})

    def spans(order, opening, closing, opens):
        there = {(t.stage, t.microbatch): opens[t] for t in order if t.kind == opening}
        ends = {(t.stage, t.microbatch): run.end[t] for t in order if t.kind in closing}
        return [(there[pair], ends[pair]) for pair in ends]

    for device, order in enumerate(schedule.tasks):
        live = spans(order, "F", "BW", run.start)
        pending = spans(order, "I", "W", run.end)
        for found, each in ((run.peak_live, live), (run.peak_weights_pending, pending)):
            counted = [sum(a <= now < b for a, b in each) for now in moments]
            assert found[device] == max(counted)


@everywhere
def test_written_by_hand_it_is_the_same_schedule(name):
    for _, schedule in served(name=name, most_microbatches=9):
        by_hand = [[tuple(task) for task in order] for order in schedule.tasks]
        assert from_tasks(by_hand) == schedule
        check(by_hand)
        assert timeline(by_hand).start == timeline(schedule).start


@quickly
@given(random_orders, st.integers(0, 10**6))
def test_check_finds_exactly_the_orders_that_cannot_run(orders, seed):
    draw = random.Random(seed)
    device = draw.randrange(len(orders))
    a, b = (draw.randrange(len(orders[device])) for _ in range(2))
    orders[device][a], orders[device][b] = orders[device][b], orders[device][a]
    schedule = from_tasks(orders)
    graph = {task: set(schedule.dependencies(task)) for order in orders for task in order}
    for before, after in itertools.chain.from_iterable(map(itertools.pairwise, orders)):
        graph[after].add(before)
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError:
        with pytest.raises(ValueError, match=r"^Deadlock: .* waits for"):
            check(schedule)
    else:
        check(schedule)
        done = []
        for task in run_order(schedule):
            assert graph[task] <= set(done)
            done.append(task)


@everywhere
def test_dependencies_are_those_of_the_chain_rule(name):
    schedule = spread(name, 2, 4)
    last, there = schedule.stages - 1, {task for order in schedule.tasks for task in order}
    for task in there:
        stage, kind, k = task
        needs = {"F": [("F", stage - 1)], "W": [("I", stage)]}.get(kind)
        if needs is None:
            needs = [("F", stage), ("B", stage + 1), ("I", stage + 1)]
        needs = {Task(s, kind, k) for kind, s in needs if 0 <= s <= last}
        assert set(schedule.dependencies(task)) == needs & there
        assert len(schedule.dependencies(task)) == len(needs & there)


def test_what_is_live_over_time():
    """1F1B on two devices, F 1 and B 2: the second forward's activations come and go."""
    run = timeline(SCHEDULES["1f1b"](2, 2, 2), {"F": 1, "B": 2})
    assert run.live == (((0, 1), (1, 2), (6, 1), (9, 0)), ((0, 0), (1, 1), (4, 1), (7, 0)))


@quickly
@given(any_table, kinds)
def test_what_is_live_is_what_has_begun_and_not_ended(schedule, costs):
    run = timeline(schedule, costs)
    for order, counts in zip(schedule.tasks, run.live, strict=True):
        for time, number in counts:
            begun = [t for t in order if t.kind == "F" and run.start[t] <= time]
            done = [t for t in order if t.kind in "BW" and run.end[t] <= time]
            assert number == len(begun) - len(done)


# Costs of stages, transfers


def test_costs_by_stage_and_by_task_go_before_costs_by_kind():
    schedule = SCHEDULES["gpipe"](2, 2, 2)
    head, odd = (1, "B"), Task(1, "B", 1)
    run = timeline(schedule, {"F": 1, "B": 2, head: 5, odd: 9})
    assert run.end[Task(1, "B", 0)] - run.start[Task(1, "B", 0)] == 5
    assert run.end[odd] - run.start[odd] == 9
    assert run.makespan == 1 + 2 + 5 + 9 + 2
    assert run.busy == (6, 16) and run.gaps == (13, 0)


def test_transfers_take_time_between_devices_only():
    order = [Task(0, "F", 0), Task(1, "F", 0), Task(2, "F", 0)]
    order += [task._replace(kind="B") for task in reversed(order)]
    one, two = [order], [[t for t in order if t.stage < 2], [t for t in order if t.stage == 2]]
    assert timeline(one, transfer=10).makespan == 9
    assert timeline(two, transfer=10).makespan == 9 + 2 * 10


def test_twice_the_warm_up_hides_transfers():
    costs = {"F": 1, "B": 1}
    spans = {
        name: timeline(SCHEDULES[name](4, 4, 16), costs, transfer=1).makespan
        for name in ("1f1b", "eager_1f1b")
    }
    assert spans["eager_1f1b"] < spans["1f1b"]


# Errors


@pytest.mark.parametrize(
    "name, counts, message",
    [
        ("1f1b", (8, 4, 8), r"1f1b: 8 stages on 4 devices; .* stages=4, or devices=8\."),
        ("gpipe", (4, 4, 0), r"gpipe: microbatches=0; it takes a whole number, 1 or more"),
        ("gpipe", (4, "4", 1), r"gpipe: devices='4'; it takes a whole number"),
        ("eager_1f1b", (0, 4, 1), r"eager_1f1b: stages=0; it takes a whole number"),
        ("interleaved_1f1b", (6, 4, 8), r"6 stages on 4 devices; .* as 4 or 8\."),
        ("kimi_k2", (3, 4, 8), r"kimi_k2: 3 stages on 4 devices; .* multiple of 4, as 4\."),
        ("interleaved_1f1b", (8, 4, 9), r"9 microbatches do not .* 4 or more; 8 or 10"),
        ("zb_h1", (4, 4, 3), r"zb_h1: 3 microbatches for 4 stages; it takes 4 or more"),
        ("zb_h2", (4, 2, 8), r"zb_h2: 4 stages on 2 devices; .* stages=2, or devices=4"),
        ("zb_v", (4, 4, 8), r"zb_v: 4 stages on 4 devices; it takes two on each: stages=8"),
        ("zb_v", (8, 4, 7), r"zb_v: 7 microbatches for 8 stages; it takes 8 or more"),
        ("dualpipe_v", (4, 4, 8), r"dualpipe_v: 4 stages on 4 devices; .* stages=8"),
        ("dualpipe_v", (8, 4, 7), r"dualpipe_v: 7 microbatches for 8 stages; it takes 8 or more"),
    ],
)
def test_numbers_that_a_schedule_does_not_take(name, counts, message):
    with pytest.raises(ValueError, match=message):
        SCHEDULES[name](*counts)


@everywhere
def test_every_refusal_names_the_schedule_and_every_range_is_wide(name):
    taken = 0
    for counts in itertools.product((1, 2, 4, 5, 8), (1, 2, 4), (1, 2, 4, 5, 8, 11)):
        try:
            schedule = SCHEDULES[name](*counts)
        except ValueError as error:
            assert str(error).startswith(f"{name}: ")
        else:
            assert (schedule.stages, schedule.devices, schedule.microbatches) == counts
            taken += 1
    assert taken >= 6


@pytest.mark.parametrize(
    "orders, message",
    [
        ([], "No devices"),
        ([[(0, "F", 0), (0, "B", 0)], []], "Device 1 has no tasks"),
        ([[(0, "F", 0), "B"]], r"Device 0, position 1: 'B' is no task; write Task\("),
        ([[(0, "X", 0)]], r"Device 0, position 0: .* has kind 'X'; kinds are F, B, I, W"),
        ([[(0, "F", -1)]], "has microbatch -1; it is a count from 0"),
        ([[("0", "F", 0)]], "has stage '0'; it is a count from 0"),
        ([[(0, "F", 0)], [(0, "B", 0)]], r"Stage 0 is on device 0 and, with B\(stage 0.* device 1"),
        ([[(0, "F", 0), (2, "F", 0)]], "There is a stage 2 and no 1; count from 0"),
        ([[(0, "F", 1), (0, "B", 1)]], "There is a microbatch 1 and no 0"),
    ],
)
def test_lists_that_are_no_schedule(orders, message):
    for use in from_tasks, check, timeline:
        with pytest.raises(ValueError, match=message):
            use(orders)


@pytest.mark.parametrize(
    "orders, message",
    [
        ([[(0, "F", 0)]], "Stage 0, microbatch 0 has F; it needs F and B, or F, I and W"),
        ([[(0, "F", 0), (0, "I", 0)]], "Stage 0, microbatch 0 has F, I; it needs"),
        ([[(0, "B", 0), (0, "W", 0), (0, "F", 0)]], "Stage 0, microbatch 0 has F, B, W"),
        (
            [[(0, "F", 0), (0, "B", 0), (0, "F", 0)]],
            r"F\(stage 0, microbatch 0\) stands twice on device 0, at positions 0 and 2",
        ),
        ([[(0, "F", 0), (0, "B", 0), (0, "F", 1)]], "Stage 0, microbatch 1 has F; it needs"),
    ],
)
def test_tasks_that_are_missing_or_doubled(orders, message):
    for use in check, timeline:
        with pytest.raises(ValueError, match=message):
            use(orders)


def test_a_schedule_with_tasks_in_the_wrong_place():
    good = SCHEDULES["1f1b"](2, 2, 2)
    for change, said in [
        (dict(device_of=(1, 0)), r"device_of is \(1, 0\); by its tasks it is \(0, 1\)"),
        (dict(device_of=(0,)), r"device_of is \(0,\); by its tasks it is \(0, 1\)"),
        (dict(microbatches=1), "microbatches is 1; by its tasks it is 2"),
    ]:
        with pytest.raises(ValueError, match=said):
            check(dataclasses.replace(good, **change))


def test_a_deadlock_names_the_ring_of_tasks_that_wait_for_each_other():
    first, second = map(list, SCHEDULES["1f1b"](2, 2, 2).tasks)
    first[1], first[2] = first[2], first[1]  # B0 before F1: right
    second[0], second[2] = second[2], second[0]  # F1 first, and B0 waits behind it
    with pytest.raises(ValueError) as told:
        check([first, second])
    assert str(told.value) == (
        "Deadlock: B(stage 0, microbatch 0) waits for B(stage 1, microbatch 0), which device 1 "
        "runs after F(stage 1, microbatch 1);\n"
        "  F(stage 1, microbatch 1) waits for F(stage 0, microbatch 1), which device 0 runs after "
        "B(stage 0, microbatch 0).\nMove a task that is waited for further ahead."
    )
    both = [[Task(0, "B", 0), Task(0, "F", 0)], [Task(1, "F", 0), Task(1, "B", 0)]]
    with pytest.raises(
        ValueError, match=r"^Deadlock: B\(stage 0, microbatch 0\) waits for F\(stage 0"
    ):
        check(both)  # device 1 is stuck as early, but only because of device 0
    backwards = [[Task(0, "B", 0), Task(0, "F", 0)]]
    with pytest.raises(ValueError, match=r"^Deadlock: B\(.* waits for F\(.* runs after B\("):
        timeline(backwards)


def test_costs_that_are_missing_or_negative():
    schedule = SCHEDULES["zb_h1"](2, 2, 2)
    with pytest.raises(
        ValueError, match=r"no cost for I\(stage 1, .*'I', or for \(1, 'I'\).*\['F'"
    ):
        timeline(schedule, {"F": 1, "B": 2})
    with pytest.raises(ValueError, match=r"\(1, 'F'\) costs -1; it is a time"):
        timeline(schedule, {"F": 1, "I": 1, "W": 1, (1, "F"): -1})
    with pytest.raises(ValueError, match="transfer is -2"):
        timeline(schedule, transfer=-2)


# One function, one entry


def test_a_new_schedule_is_one_function_and_one_entry(monkeypatch):
    def in_reverse(stages, devices, microbatches):
        gpipe = SCHEDULES["gpipe"](stages, devices, microbatches)
        return from_tasks(
            [order[:microbatches] + order[: microbatches - 1 : -1] for order in gpipe.tasks]
        )

    monkeypatch.setitem(SCHEDULES, "in_reverse", in_reverse)
    assert len(list(served(name="in_reverse"))) > 20
    assert spread("in_reverse", 4, 8).stages == 4
    assert timeline(spread("in_reverse", 4, 8)).makespan == 33


def test_spread_refuses_a_table_on_other_devices(monkeypatch):
    def one_each(stages, devices, microbatches):  # takes any number of stages, a device for each
        return SCHEDULES["gpipe"](stages, stages, microbatches)

    monkeypatch.setitem(SCHEDULES, "one_each", one_each)
    assert spread("one_each", 3, 6).devices == 3
    monkeypatch.setitem(SCHEDULES, "one_each", lambda *numbers: SCHEDULES["gpipe"](2, 2, 4))
    with pytest.raises(ValueError, match="asked for 8 stages on 4 devices, and its table has 2"):
        spread("one_each", 4, 4)


def test_spread_takes_as_many_stages_as_it_may():
    taken = {name: spread(name, 2, 4).stages for name in ("1f1b", "interleaved_1f1b", "zb_v")}
    assert taken == {"1f1b": 2, "interleaved_1f1b": 4, "zb_v": 4}
    with pytest.raises(ValueError, match="no schedule 'zb'; there are gpipe, 1f1b"):
        spread("zb", 2, 4)
    with pytest.raises(ValueError, match=r"^dualpipe_v: 3 microbatches for 4 stages[^:]*$"):
        spread("dualpipe_v", 2, 3)
    with pytest.raises(ValueError, match=r"^zb_h1: 3 microbatches for 4 stages[^:]*$"):
        spread("zb_h1", 4, 3)
    with pytest.raises(ValueError, match=r"microbatches=0"):
        spread("gpipe", 4, 0)


def test_schedules_need_no_jax():
    code = "import sys; from shardwise import schedules; print({'jax', 'numpy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
