"""Every layout at eight devices, beside what a user would pick instead of it.

Run from the project's root: `pip install -e . -r benchmarks/requirements.txt`, then
`python benchmarks/layouts.py --only fsdp zigzag --rounds 5`, or all, which takes about half an hour
on two cores.

Full training steps (loss, gradients, AdamW, donation) of one decoder, and of one with experts, on
eight simulated CPU devices in one process. All bytes are those of one device; `sent` has those of
each mesh axis, and after a slash what the formula says of axes by hand; of a layout by the
compiler, what it asks for (`layouts.predict`, without the tokens that travel to experts), which
`tests/test_layouts_asked.py` compares cause by cause.

Temporaries are compared three times: `of best` with the least of all rows of the same roles; `of
same` with the least of the same strategy too, for ZeRO 1 and 2 hold weights or gradients whole, and
who gathers keys or tokens holds all of them, whoever writes it; `of floor` with what the strategy
cannot but hold (`floors.py`). What a row keeps in its arguments, and others do not, counts as
temporary: by hand weights lie in shares with every ZeRO.

Ends with an error if a layout by hand sends more than its formula, or holds more than 1.2 of the
best row of its strategy; times, which depend on what else the machine does, are only shown.
"""

import argparse
import collections
import functools

import alternatives
import attention
import decoders
import floors
import formulas
import jax
import rounds

from shardwise import layouts, mesh

DEVICES, WITHIN = 8, 1.2


def ours(name):
    """The row of a layout, with its formula."""
    layout = layouts.LAYOUTS[name](DEVICES)
    bench = decoders.of(layout)
    key = jax.random.key(decoders.SEED)
    state = layouts.init(layout, bench.create, decoders.OPTIMIZER, key)
    step = layouts.step(layout, bench.loss, decoders.OPTIMIZER, has_aux=bench.mixed, check=False)
    whole = functools.partial(layouts.whole, layout)
    row = rounds.Row(name, layout.mesh, step, state, decoders.batch(), whole)
    row.layout, row.bench, row.strategy = layout, bench, floors.strategy(layout)
    # The formulas know of no stages; those are the package's own, but for experts.
    row.asked = asked(layout, bench)
    if layout.by_hand and not layout.stage:
        row.asked = formulas.by_hand(layout, bench)
    row.limit = row.asked if layout.by_hand else None
    return row


def asked(layout, bench):
    """{mesh axes: bytes} that a layout by the compiler asks for; the most of any stage."""
    given = bench.abstract, decoders.batch()
    more = dict(remat=bench.config.remat, loss=bench.loss, has_aux=bench.mixed)
    stages = range(layout.size("stage"))
    found = [layouts.predict(layout, *given, stage=stage, **more).sent for stage in stages]
    more = formulas.of_experts(layout, bench) if layout.stage and layout.by_hand else {}
    total, order = collections.Counter(), list(layout.mesh.shape)
    for sent in (max(found, key=lambda sent: sum(sent.values())), more):
        for axes, size in sent.items():
            total[tuple(sorted(axes, key=order.index))] += size
    return dict(total)


def others(chosen):
    """[rows] of what a user would pick, once for each set of roles, and ZeRO, among the chosen."""
    found, seen = [], set()
    for name in chosen:
        layout = layouts.LAYOUTS[name](DEVICES)
        kind = frozenset(layout.roles()), layout.zero
        if kind not in seen:
            seen.add(kind)
            bench = decoders.of(layout)
            for row in alternatives.of(layout, bench):
                if isinstance(row, rounds.Row):
                    row.layout, row.bench, row.limit, row.asked = layout, bench, None, {}
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
    row.layout, row.bench = layouts.Layout(grid, data="data"), bench
    row.limit, row.asked, row.strategy = None, {}, ""
    return row


def misses(row, rows):
    """What a layout by hand sends or holds too much, in words."""
    if row.limit is None:
        return
    for axes, size in row.sent.items():
        most = row.limit.get(axes, 0)
        if set(axes).isdisjoint(row.layout.tensor) and size > most:
            yield f"{row.name} sends {size:,} along {axes}, and its formula says {most:,}"
    ratio, best = compared(row, _like(row, rows))
    if ratio > WITHIN:
        yield f"{row.name} holds {ratio:.2f} of the temporaries of {best.name}"


def compared(row, rows):
    """(the row's temporaries by the least of all rows, whose these are)."""
    least = min(other.memory.arguments for other in rows)

    def held(row):
        return row.memory.temporaries + row.memory.arguments - least

    best = min(rows, key=held)
    return held(row) / held(best), best


def _like(row, rows):
    """The rows of the same roles, in the same sizes, of the same strategy or any."""
    same = [r for r in rows if r.layout.roles() == row.layout.roles()]
    return [r for r in same if r.strategy in (row.strategy, alternatives.ANY)]


def table(first, rows):
    """The rows by their roles, as text."""
    fastest = min(row.median for row in [first, *rows])
    held = ("args MB", "temp MB", "of best", "of same", "floor MB", "of floor")
    head = ("roles", "", "step s", "ratio", *held, "sent MB")
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
    times = ("-", "-")
    if row.seconds:
        times = (f"{row.median:.3f}", f"{row.median / fastest:.2f}")
    held = (_mb(row.memory.arguments), _mb(row.memory.temporaries))
    found = [f"{compared(row, group)[0]:.2f}" for group in (same, _like(row, same))]
    sent = "; ".join(
        f"{'×'.join(axes)} {_mb(row.sent.get(axes, 0))}"
        + (f"/{_mb(row.asked[axes])}" if axes in row.asked else "")
        for axes in dict.fromkeys([*row.sent, *row.asked])
    )
    return roles, row.name, *times, *held, *found, *_floor(row), sent or "-"


def _floor(row):
    """(the floor, temporaries by it), as text."""
    if row.layout.stage or row.strategy == alternatives.ANY:
        return "-", "-"
    floor = floors.floor(row.layout, row.bench)
    return _mb(floor), f"{row.memory.temporaries / floor:.2f}"


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
