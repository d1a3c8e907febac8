"""Every layout at eight devices, beside what a user would pick instead of it.

Run from the project's root: `pip install -e . -r benchmarks/requirements.txt`, then
`python benchmarks/layouts.py --only fsdp zigzag --rounds 5`, or all, which takes about half an hour
on two cores.

Full training steps (loss, gradients, AdamW, donation) of one decoder, and of one with experts, on
eight simulated CPU devices in one process. All bytes are those of one device; `sent` has those of
each mesh axis, and after a slash what the formula says of axes by hand. Ends with an error if a
layout by hand sends more than its formula, or holds more than 1.2 of the temporaries of the best
row of the same roles, unless its settings ask for that (ZeRO 1 and 2, keys or tokens gathered to
stay); times, which depend on what else the machine does, are only shown.
"""

import argparse
import functools

import alternatives
import attention
import decoders
import formulas
import jax
import rounds
import stages

from shardwise import layouts, mesh

DEVICES, WITHIN = 8, 1.2


def ours(name):
    """The row of a layout, with its formula."""
    layout = layouts.LAYOUTS[name](DEVICES)
    bench = decoders.of(layout)
    key = jax.random.key(decoders.SEED)
    given = key, bench.loss, decoders.batch(), bench.mixed
    state = layouts.init(layout, bench.create, decoders.OPTIMIZER, *given)
    step = layouts.step(layout, bench.loss, decoders.OPTIMIZER, has_aux=bench.mixed)
    kind = functools.partial(stages.Staged, layout, bench) if layout.stage else rounds.Row
    whole = functools.partial(layouts.whole, layout)
    row = kind(name, layout.mesh, step, state, decoders.batch(), whole)
    row.layout = layout
    row.limit = formulas.by_hand(layout, bench) if layout.by_hand else None
    return row


def others(chosen):
    """[rows] of what a user would pick, once for each set of roles that is among the chosen."""
    found, seen = [], set()
    for name in chosen:
        layout = layouts.LAYOUTS[name](DEVICES)
        roles = frozenset(layout.roles())
        if roles not in seen:
            seen.add(roles)
            for row in alternatives.of(layout, decoders.of(layout)):
                if isinstance(row, rounds.Row):
                    row.layout, row.limit = layout, None
                found.append(row)
    return found


def compare(chosen, count):
    """Print the table of these layouts and their alternatives; what missed its target."""
    missed = []
    for mixed in (False, True):
        names = [name for name in chosen if bool(layouts.LAYOUTS[name](DEVICES).expert) == mixed]
        if names:
            bench = decoders.bench(mixed)
            found = [ours(name) for name in names] + others(names)
            rows = [row for row in found if isinstance(row, rounds.Row)]
            first = one_device(bench)
            rounds.time_all([first, *rows], min(count, 1))  # in which programs of stages compile
            rounds.time_all([first, *rows], count)
            if count:
                rounds.check([first, *rows], steps=0)
            total = sum(x.size for x in jax.tree.leaves(bench.abstract))
            what = f"{bench.config.experts} experts" if mixed else "dense"
            print(f"\n{what}: {total:,} parameters, {decoders.ROWS} rows of {decoders.LENGTH}")
            print(table(first, rows))
            missed += [told for row in rows for told in misses(row, rows)]
            for row in found:
                if isinstance(row, rounds.Missing):
                    print(f"{row.name}: {row.why}")
    return missed


def one_device(bench):
    """The row that all others must equal."""
    *state, batch = alternatives.arguments(bench)
    grid = mesh.make(data=1)
    row = rounds.Row("one device", grid, jax.jit(bench.step, donate_argnums=(0, 1)), state, batch)
    row.layout, row.limit = layouts.Layout(grid, data="data"), None
    return row


def misses(row, rows):
    """What a layout by hand sends or holds too much, in words."""
    if row.limit is None:
        return
    for axes, size in row.sent.items():
        most = row.limit.get(axes, 0)
        if set(axes).isdisjoint(row.layout.tensor) and size > most:
            yield f"{row.name} sends {size:,} along {axes}, and its formula says {most:,}"
    best = min(_like(row, rows), key=lambda other: other.memory.temporaries)
    ratio = row.memory.temporaries / best.memory.temporaries
    if ratio > WITHIN and not _holds_more(row.layout):
        yield f"{row.name} holds {ratio:.2f} of the temporaries of {best.name}"


def _holds_more(layout):
    """Whether its settings ask for memory: weights, keys or tokens gathered to stay."""
    gathers = layout.attention == "all_gather" or layout.dispatch == "gather"
    return gathers or (bool(layout.fsdp) and layout.zero < 3)


def _like(row, rows):
    """The rows of the same roles, in the same sizes."""
    return [r for r in rows if r.layout.roles() == row.layout.roles()]


def table(first, rows):
    """The rows by their roles, as text."""
    fastest = min(row.median for row in [first, *rows])
    head = ("roles", "", "step s", "ratio", "args MB", "temp MB", "of best", "sent MB")
    cells = [head, _cells(first, [first], fastest, "")]
    groups = dict.fromkeys(tuple(row.layout.roles()) for row in rows)
    for roles in groups:
        same = [row for row in rows if tuple(row.layout.roles()) == roles]
        cells += [_cells(row, same, fastest, ", ".join(roles)) for row in same]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = {0, 1, len(head) - 1}
    lines = []
    for row in cells:
        pairs = enumerate(zip(row, widths, strict=True))
        lines.append([c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in pairs])
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _cells(row, same, fastest, roles):
    best = min(other.memory.temporaries for other in same)
    times = ("-", "-")
    if row.seconds:
        times = (f"{row.median:.3f}", f"{row.median / fastest:.2f}")
    held = (_mb(row.memory.arguments), _mb(row.memory.temporaries))
    limit = row.limit or {}
    sent = "; ".join(
        f"{'×'.join(axes)} {_mb(row.sent.get(axes, 0))}"
        + (f"/{_mb(limit[axes])}" if axes in limit else "")
        for axes in dict.fromkeys([*row.sent, *limit])
    )
    return roles, row.name, *times, *held, f"{row.memory.temporaries / best:.2f}", sent or "-"


def _mb(size):
    return f"{size / 1e6:.3f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=layouts.LAYOUTS, metavar="NAME")
    parser.add_argument("--tables", nargs="+", choices=("steps", "attention"))
    parser.add_argument("--rounds", type=int, default=5, help="0: bytes alone, nothing is run")
    options = parser.parse_args()
    mesh.simulate(DEVICES)
    tables = options.tables or ["steps", "attention"]
    print(f"jax {jax.__version__}, {options.rounds} rounds")
    missed = []
    if "steps" in tables:
        missed += compare(options.only or list(layouts.LAYOUTS), options.rounds)
    if "attention" in tables:
        missed += attention.compare()
    print(*(f"MISSED: {told}" for told in missed), sep="\n")
    raise SystemExit(bool(missed))
