"""The report of a launcher: who failed, at which step, doing what, and its last lines."""

from collections.abc import Mapping, Sequence

from shardwise.run.launch import statuses
from shardwise.run.launch.children import Child
from shardwise.run.launch.notes import Note
from shardwise.run.launch.watching import Hang

# What a process does without the others: one that stands there waits for none of them.
ALONE = ("starting", "compiling", "reading")


def failure(first: Child, others: Sequence[Child], notes: Mapping[int, Note]) -> list[str]:
    """The lines that tell of the first failure, whose own come last."""
    return [*_ends(others), *_last(first), _named(first, statuses.told(first.code), notes)]


def hanging(hang: Hang, children: Sequence[Child]) -> list[str]:
    """The lines that tell of processes that hang; the odd ones come last."""
    codes = {child.index: child.code for child in children}
    lines = [
        f"process {i}: {note.told()}, for {hang.idle[i]:.0f} s; it {statuses.told(codes[i])}"
        for i, note in sorted(hang.notes.items())
    ]
    odd = [child for child in children if child.index in hang.odd]
    lines += [line for child in odd or children for line in _last(child)]
    if not odd:
        lines += ["No process moves, and all note the same: which one hangs cannot be told."]
    return [*lines, *(_named(child, _differs(hang, child.index), hang.notes) for child in odd)]


def killed(number: str, children: Sequence[Child], notes: Mapping[int, Note]) -> list[str]:
    """The lines that tell of a second signal, which nobody survived."""
    ends = [_named(child, statuses.told(child.code), notes) for child in children]
    return [*ends, f"a second signal, {number}, killed those that ran"]


def _differs(hang, index):
    """What is known of an odd one: that it hangs, or only that it and the others do not meet."""
    rest = "; ".join(sorted({n.told() for i, n in hang.notes.items() if i not in hang.odd}))
    if not hang.stopped and index in hang.notes and hang.notes[index].doing not in ALONE:
        return (
            f"differs from the others ({rest}), and all wait; who made a call more, or one less, "
            f"notes do not tell: compare the calls that each has made, and the stacks"
        )
    beside = f", while the others wait ({rest})" if rest else ""
    return f"{'is stopped (SIGSTOP, or a debugger)' if hang.stopped else 'hangs'}{beside}"


def _named(child, what, notes):
    note = notes.get(child.index)
    where = "before it noted a step" if note is None else f"at {note.told()}"
    line = f"; its note says: {note.line}" if note is not None and note.line else ""
    raised = f"; its last traceback ends: {child.raised}" if child.raised else ""
    return f"process {child.index} (pid {child.pid}), {where}, {what}{line}{raised}"


def _ends(children):
    return [f"process {child.index} {statuses.told(child.code)}" for child in children]


def _last(child):
    return [f"[{child.index}] {line}" for line in child.lines]
