"""The interactive figure that steps through a ring: which device sends which block to whom."""

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import ArrayLike

from shardwise_book.figures import palette
from shardwise_book.figures.interactive import (
    STYLE,
    Choice,
    Data,
    Interactive,
    controls,
    select,
    status,
    steps,
)

Pairs = Sequence[Sequence[tuple[int, int]]]  # of each step, (from, to)
Runs = Mapping[str, Mapping[int, tuple[ArrayLike, Pairs]]]
_RADIUS = 46  # of a device's circle; the ring's own is 152 around (200, 200)


def ring_stepper(
    runs: Runs,
    payload: int = 840_000,
    name: str = "all-reduce",
    devices: int = 4,
) -> Interactive:
    """Choose a collective and the number of devices; step through what moves, and count it.

    `runs` maps the name of a collective to {n: (history, pairs)}, for the same n in all. `history`
    holds integers [steps + 1, n devices, n blocks], what each device held at the start and after
    each step, with bit d for what came from device d; `pairs` holds each step's (from, to).
    `payload` is the size in bytes of all n blocks together: a multiple of every n. The figure first
    shows the collective `name` on `devices` devices.

    Raises:
      ValueError: a device received in some step what the device paired with it did not hold.
    """
    data = table(runs, payload)
    start = {"kind": [*runs].index(name), "n": devices, "step": 1}
    still = _controls(data, start) + _picture(data, start) + status(describe(data, start))
    return Interactive("ring.js", data | {"start": start}, STYLE + still)


def table(runs: Runs, payload: int = 840_000) -> Data:
    """Everything on offer, as plain numbers; ring.js reads the same."""
    sizes = sorted(next(iter(runs.values())))
    kinds = []
    for name, found in runs.items():
        recorded = [_recorded(name, *found[n]) for n in sizes]
        adds = any(moves[3] > 1 for one in recorded for step in one["moves"] for moves in step)
        kinds.append({"name": name, "adds": adds, "runs": recorded})
    return {
        "sizes": sizes,
        "kinds": kinds,
        "payload": payload,
        "colours": palette.DEVICES,
        "places": [[_place(n, d) for d in range(n)] for n in sizes],
        "arrows": [[[_arrow(n, s, t) for t in range(n)] for s in range(n)] for n in sizes],
    }


def look(data: Data, choice: Choice) -> Data:
    """What the devices hold after a step, what moved in it and how much so far; as in ring.js."""
    kind, i = data["kinds"][choice["kind"]], data["sizes"].index(choice["n"])
    run, block = kind["runs"][i], data["payload"] // choice["n"]
    first = [sum(s == 0 for s, *_ in step) for step in run["moves"]]  # blocks that device 0 sends
    return {
        "held": run["held"][choice["step"]],
        "moves": run["moves"][choice["step"] - 1] if choice["step"] else [],
        "steps": len(run["moves"]),
        "block": block,
        "sent": block * sum(first[: choice["step"]]),
        "all": block * sum(first),
    }


def describe(data: Data, choice: Choice) -> str:
    """The step in words, as ring.js writes them too; numbers carry names."""
    answer, n, kind = look(data, choice), choice["n"], data["kinds"][choice["kind"]]
    turns = answer["all"] * n // (data["payload"] * (n - 1))
    formula = f"{'' if turns == 1 else turns}B(n − 1)/n"
    name = escape(kind["name"][:1].upper() + kind["name"][1:])
    words = [
        f'{name} on {n} devices, after <b data-name="step">{choice["step"]}'
        f'</b> of <b data-name="steps">{answer["steps"]}</b> steps.'
    ]
    for source, target, slot, count in (m for m in answer["moves"] if m[0] == 0):
        what = f"block {slot}" + (f", {count} of {n} added up," if kind["adds"] else "")
        words.append(f"Device {source} has just sent {what} to device {target}.")
    words.append(
        f'Each device has sent <b data-name="sent">{answer["sent"]:,}</b> of '
        f'<b data-name="all">{answer["all"]:,}</b> bytes: {formula} for B = {data["payload"]:,}, '
        f'in blocks of <b data-name="block">{answer["block"]:,}</b>.'
    )
    return " ".join(words)


def ring_picture(data: Data, choice: Choice) -> str:
    """The devices on their ring, each with its blocks; arrows for what has just moved."""
    answer, n = look(data, choice), choice["n"]
    i, kind = data["sizes"].index(n), data["kinds"][choice["kind"]]
    arrived = {(target, slot) for _, target, slot, _ in answer["moves"]}
    parts = []
    for source, target in dict.fromkeys((move[0], move[1]) for move in answer["moves"]):
        line, head = data["arrows"][i][source][target]
        parts.append(
            f'<path class="move" d="{line}" stroke="currentColor" stroke-width="3"></path>'
            f'<path d="{head}"></path>'
        )
    for device, blocks in enumerate(answer["held"]):
        x, y = data["places"][i][device]
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="{_RADIUS}" fill="none" stroke="currentColor"></circle>'
            f'<text x="{x}" y="{y - 24}" text-anchor="middle">device {device}</text>'
        )
        for slot, mark in enumerate(blocks):
            parts.append(_bar(data, kind["adds"], n, (x, y), slot, mark, (device, slot) in arrived))
    return "".join(parts)


def _bar(data, adds, n, middle, slot, mark, arrived):
    """One block: as high as the share of its contributions, and how many or whose they are."""
    width = 64 // n
    x, y = middle[0] - width * n // 2 + slot * width, middle[1] - 18
    count, sender = mark.bit_count(), mark.bit_length() - 1
    high = 36 * count // n if adds else 36 * min(count, 1)
    colour = data["colours"][slot if adds else max(sender, 0)]
    label = count if adds else "" if sender < 0 else sender
    frame = 'stroke-width="2.5"' if arrived else 'stroke-opacity=".5"'
    return (
        f'<rect x="{x}" y="{y + 36 - high}" width="{width}" height="{high}" fill="{colour}"></rect>'
        f'<rect class="block" x="{x}" y="{y}" width="{width}" height="36" fill="none" '
        f'stroke="currentColor" {frame}></rect>'
        f'<text x="{x + width / 2:g}" y="{y + 48}" text-anchor="middle">{label}'
        "</text>"
    )


def _picture(data, choice):
    return (
        '<p style="margin: .9rem 0 0; font-size: .88em">A bar is a block. Where blocks are added '
        "up, its colour says which, its height and number how many devices have contributed; "
        "elsewhere, colour and number say whose it is. Bold frames have just arrived.</p>"
        '<div class="pictures"><svg id="@ring" viewBox="0 0 400 400" style="max-width: 29rem; '
        'font-size: 12.5px" '
        'role="img" aria-label="The devices on a ring, the blocks that each holds, and arrows for '
        f'what has just moved">{ring_picture(data, choice)}</svg></div>'
    )


def _controls(data, start):
    names, sizes = [k["name"] for k in data["kinds"]], [str(n) for n in data["sizes"]]
    made = select("kind", "Collective", names, start["kind"])
    made += select("n", "Devices", sizes, data["sizes"].index(start["n"]))
    made += steps("Step", look(data, start)["steps"], start["step"])
    return controls(made, "step")


def _recorded(name, history, pairs):
    """One run as lists, and the moves of each step: [from, to, block, contributions]."""
    history = np.asarray(history)
    moves = []
    for k, sent in enumerate(pairs):
        before, after = history[k], history[k + 1]
        step = []
        for source, target in sent:
            for slot in np.flatnonzero(before[target] != after[target]):
                came = [after[target, slot] - before[target, slot], after[target, slot]]
                held = int(before[source, slot])
                if held not in came:
                    raise ValueError(
                        f"figures.ring_stepper: {name} on {len(before)} devices, step {k}: block "
                        f"{slot} of device {target} went from {before[target, slot]} to "
                        f"{after[target, slot]}, and device {source}, which is paired with it, "
                        f"held {held}; expected what it held, added or in its place."
                    )
                step.append([source, target, int(slot), held.bit_count()])
        moves.append(step)
    return {"held": history.tolist(), "moves": moves}


def _place(n, device):
    """Where a device stands: clockwise from the top."""
    angle = 2 * math.pi * device / n
    return [round(200 + 152 * math.sin(angle)), round(200 - 152 * math.cos(angle))]


def _arrow(n, source, target):
    """The line and the head of an arrow between two circles, a little to its left, as SVG paths."""
    if source == target:
        return ["", ""]
    (x0, y0), (x1, y1) = _place(n, source), _place(n, target)
    length = math.dist((x0, y0), (x1, y1))
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    x0, y0, x1, y1 = x0 + 6 * uy, y0 - 6 * ux, x1 + 6 * uy, y1 - 6 * ux

    def along(x, y, forward, aside=0):
        return f"{x + forward * ux - aside * uy:.1f} {y + forward * uy + aside * ux:.1f}"

    end = -_RADIUS - 2
    line = f"M{along(x0, y0, _RADIUS + 2)}L{along(x1, y1, end - 8)}"
    head = f"M{along(x1, y1, end)}L{along(x1, y1, end - 9, 6)}L{along(x1, y1, end - 9, -6)}Z"
    return [line, head]
