"""The figure that steps through a ring: which device sends which block to whom."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardwise_book.figures import svg
from shardwise_book.figures.interactive import Control, Interactive, explorer, said

Pairs = Sequence[Sequence[tuple[int, int]]]  # of each step, (from, to)
Runs = Mapping[str, Mapping[int, tuple[ArrayLike, Pairs]]]
PAYLOAD = 840_000  # bytes of all blocks together: a multiple of every n up to 8
_RADIUS = 46  # of a device's circle; the ring's own is 152 around (200, 200)
_KEY = """<p style="margin: .9rem 0 0; font-size: .88em">A bar is a block. In an all-gather its
colour and number say whose it is. In the others its colour says which block it is, its height and
number how many devices have contributed. Bold frames have just arrived.</p>"""


class Recorded(NamedTuple):
    """One run: what is held [steps + 1, devices, blocks], as marks, and what moves in each step.

    A move is (from, to, block, how many devices have contributed to what is sent).
    """

    held: np.ndarray
    moves: list[list[tuple[int, int, int, int]]]


def ring_stepper(runs: Runs) -> Interactive:
    """Choose a collective and the number of devices; step through what moves, and count it.

    `runs` maps the name of a collective to {n: (history, pairs)}, for the same n in all. `history`
    holds integers [steps + 1, n devices, n blocks], what each device held at the start and after
    each step, with bit d for what came from device d; `pairs` holds each step's (from, to).

    Raises:
      ValueError: a device received in some step what the device paired with it did not hold.
    """
    sizes = sorted(next(iter(runs.values())))

    def run(kind, n):
        return record(kind, *runs[kind][n])

    def adds(kind):
        """Whether blocks are added up on their way."""
        steps = (step for n in sizes for step in run(kind, n).moves)
        return any(count > 1 for step in steps for *_, count in step)

    controls = {
        "kind": Control("Collective", list(runs)),
        "n": Control("Devices", sizes),
        "step": Control("Step", lambda run: range(len(run.held)), "steps"),
    }
    alt = "The devices on a ring, the blocks that each holds, and arrows for what has just moved"
    layout = f'{_KEY}<div class="pictures">{svg.picture("ring", 400, 400, alt, rem=29)}</div>'
    start = {"n": min(2, len(sizes) - 1), "step": 1}
    return explorer(controls, layout, run, adds, _ring, start=start, shows="step", result=describe)


def record(name: str, history: ArrayLike, pairs: Pairs) -> Recorded:
    """The moves behind a history; ValueError where a device received what its pair did not hold."""
    history = np.asarray(history)
    moves = []
    for k, sent in enumerate(pairs):
        before, after = history[k], history[k + 1]
        step = []
        for source, target in sent:
            for slot in np.flatnonzero(before[target] != after[target]).tolist():
                came = [after[target, slot] - before[target, slot], after[target, slot]]
                held = int(before[source, slot])
                if held not in came:
                    raise ValueError(
                        f"figures.ring_stepper: {name} on {len(before)} devices, step {k}: block "
                        f"{slot} of device {target} went from {before[target, slot]} to "
                        f"{after[target, slot]}, and device {source}, which is paired with it, "
                        f"held {held}; expected what it held, added or in its place."
                    )
                step.append((source, target, slot, held.bit_count()))
        moves.append(step)
    return Recorded(history, moves)


def describe(kind: str, run: Recorded, step: int, adds: bool) -> str:
    """The step in words; numbers carry names."""
    n, steps = run.held.shape[1], len(run.moves)
    block = PAYLOAD // n
    sends = [sum(source == 0 for source, *_ in moves) for moves in run.moves]
    every = block * sum(sends)
    turns = every * n // (PAYLOAD * (n - 1))
    formula = f"{'' if turns == 1 else turns}B(n − 1)/n"
    words = [
        f"{said('kind', kind[:1].upper() + kind[1:])} on {n} devices, after {said('step', step)} "
        f"of {said('steps', steps)} steps."
    ]
    for source, target, slot, count in run.moves[step - 1] if step else []:
        if source == 0:
            what = f"block {slot}" + (f", {count} of {n} added up," if adds else "")
            words.append(f"Device 0 has just sent {what} to device {target}.")
    words.append(
        f"Each device has sent {said('sent', block * sum(sends[:step]))} of {said('all', every)} "
        f"bytes: {formula} for B = {PAYLOAD:,}, in blocks of {said('block', block)}."
    )
    return " ".join(words)


def _ring(run, step, adds):
    """The devices on their ring, each with its blocks; arrows for what has just moved.

    A block is as high as the share of its contributions, and says how many or whose they are.
    """
    moves, n = run.moves[step - 1] if step else [], run.held.shape[1]
    arrived, wide = {(target, slot) for _, target, slot, _ in moves}, 64 // n
    yield from (_arrow(n, *pair) for pair in dict.fromkeys(move[:2] for move in moves))
    for device, blocks in enumerate(run.held[step].tolist()):
        x, y = _place(n, device)
        yield f'<circle cx="{x}" cy="{y}" r="{_RADIUS}" fill="none" {svg.EDGE}/>'
        yield svg.text(x, y - 24, f"device {device}", "middle")
        for slot, mark in enumerate(blocks):
            left = x + wide * slot - wide * n // 2
            count, sender = mark.bit_count(), mark.bit_length()
            high = 36 * count // n if adds else 36 * min(count, 1)
            colour = svg.device(slot if adds else max(sender - 1, 0))
            bold = 2.5 if (device, slot) in arrived else 0.5
            edge = f'{svg.EDGE} class="block" stroke-width="{bold}"'
            yield svg.box(left, y + 18 - high, wide, high, colour, "")
            yield svg.box(left, y - 18, wide, 36, more=edge)
            label = count if adds else sender - 1 if mark else ""
            yield svg.text(left + wide / 2, y + 30, label, "middle")


def _place(n, device):
    """Where a device stands: clockwise from the top."""
    angle = 2 * math.pi * device / n
    return round(200 + 152 * math.sin(angle)), round(200 - 152 * math.cos(angle))


def _arrow(n, source, target):
    """From one circle to another, a little to the left of the line between their centres."""
    (x, y), end = _place(n, source), _place(n, target)
    turn = math.degrees(math.atan2(end[1] - y, end[0] - x))
    tip = math.dist((x, y), end) - _RADIUS - 2
    return (
        f'<g transform="translate({x} {y}) rotate({turn:.1f}) translate(0 -6)">'
        f'<path class="move" d="M{_RADIUS + 2} 0H{tip - 8:.1f}" {svg.EDGE} stroke-width="3"/>'
        f'<path d="M{tip:.1f} 0l-9 6v-12z"/></g>'
    )
