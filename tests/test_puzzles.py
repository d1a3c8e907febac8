"""Each puzzle: its stub is open, wrong answers are told how they are wrong, its solution solves."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
import sampling
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import marks, mesh, plan, rules, schedules
from shardwise_book import puzzles
from shardwise_book.puzzles import judging

NAMES = [n for n in puzzles.__all__ if n not in ("Verdict", "halo", "layer", "squares")]
DECODER = ("vocab", "embed", "heads", "kv_heads", "head_dim", "mlp")


@pytest.fixture(autouse=True, scope="module")
def devices():
    mesh.simulate(8)


def psum(x):
    return jax.lax.psum(x, "x")


# --- solutions ---


def cheapest(i, j, k):
    sizes = {"A": i * j, "B": j * k, "C": 2 * i * k}
    rows, columns = P("model", None), P(None, "model")
    layouts = {"A": (columns, columns), "B": (rows, rows), "C": (columns, rows)}
    return layouts[min(sizes, key=sizes.get)]


def segmented(weights, x, segments=8):
    @jax.checkpoint
    def segment(x, some):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, some)[0], None

    return jax.lax.scan(segment, x, weights.reshape(segments, -1, *weights.shape[1:]))[0]


def in_parts(weights, batch, parts=4):
    def add(sums, part):
        def loss(w):
            return tuple(puzzles.squares(w, part))

        (total, count), grads = jax.value_and_grad(loss, has_aux=True)(weights)
        return jax.tree.map(jnp.add, sums, (total, count, grads)), None

    split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
    zeros = jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights)
    total, count, grads = psum(jax.lax.scan(add, zeros, split)[0])
    return total / count, jax.tree.map(lambda g: g / count, grads)


def halving(blocks):
    me, n = jax.lax.axis_index("x"), len(blocks)
    for k in reversed(range(n.bit_length() - 1)):
        mine = (me >> k) & 1
        halves = blocks.reshape(2, -1, *blocks.shape[1:])
        partners = [(d, d ^ (1 << k)) for d in range(n)]
        blocks = halves[mine] + jax.lax.ppermute(halves[1 - mine], "x", partners)
    return blocks[0]


def tree(xs):
    while len(xs) > 1:
        xs = xs[0::2] + xs[1::2]
    return xs[0]


def as_a_tree(xs):
    n, own = jax.lax.axis_size("x"), tree(xs)
    return tree(jax.lax.all_to_all(own.reshape(n, -1), "x", 0, 0))


def gathered_as_a_tree(xs):
    n, me = jax.lax.axis_size("x"), jax.lax.axis_index("x")
    return tree(jax.lax.all_gather(tree(xs), "x")).reshape(n, -1)[me]


def back(y):
    n = jax.lax.axis_size("x")
    edge = jax.lax.ppermute(y[:1], "x", [(d, (d - 1) % n) for d in range(n)])
    return y[1:].at[-1:].add(edge)


def gathered(w):
    return jax.tree.map(lambda a: jax.lax.all_gather(a, "fsdp", tiled=True), w)


@jax.checkpoint
def again(x, w):
    return puzzles.layer(x, gathered(w)), None


def clipped(grads, limit):
    squares = {name: jnp.sum(g**2) for name, g in grads.items()}
    norm = jnp.sqrt(psum(squares["w"] + squares["v"]) + squares["b"])
    return {name: g * jnp.minimum(1, limit / norm) for name, g in grads.items()}


def one_layer_at_a_time(key):
    return jax.lax.map(lambda k: jax.random.uniform(k, (128, 128)), jax.random.split(key, 8))


def like(tree, grid):
    layouts = rules.shardings(rules.FSDPRule(grid.axis_names, min_size=2), tree, grid)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, layouts
    )


def marked(*after):
    def forward(weights, x):
        for i, w in enumerate(weights, 1):
            x = jnp.tanh(x @ w)
            x = marks.stage_boundary(x) if i in after else x
        return x

    return forward


def over_sides(sent, sides, link, ring_from, line=1):
    return sent / sum(link * (line if side % ring_from else 2) for side in sides)


TABLE = dict(zip(DECODER, ("model", "data", "model", "model", None, "model"), strict=True))
LISTS = [
    "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3",
    "F0 F1 I0 W0 I1 W1 F2 F3 I2 W2 I3 W3",
    "F0 I0 F1 I1 W0 W1 F2 I2 W2 F3 I3 W3",
]
SOLUTIONS = {
    "bands": P(("model", "data")),
    "product": cheapest,
    "segments": segmented,
    "accumulated": in_parts,
    "table": TABLE,
    "born": one_layer_at_a_time,
    "target": like,
    "scatter": halving,
    "one_order": as_a_tree,
    "transpose": back,
    "gather": again,
    "clip": clipped,
    "settings": dict(zero=2, dtype="bfloat16", reduce_dtype="float32"),
    "order": LISTS,
    "boundaries": marked(2, 4),
    "smallest": "v5p:2x2x4",
    "division": plan.Roles(fsdp=32, tensor=2, remat=True, products=True),
    "split": plan.Roles(fsdp=1024, tensor=4, remat=True),
    "gather_seconds": over_sides,
}


# --- wrong answers, and what is said of each ---


def every_part(weights, batch):
    mean, grads = [], []
    for part in range(4):
        rows = {k: x.reshape(4, -1, *x.shape[1:])[part] for k, x in batch.items()}

        def loss(w, rows=rows):
            return tuple(puzzles.squares(w, rows))

        sums = psum(jax.value_and_grad(loss, has_aux=True)(weights))
        mean.append(sums[0])
        grads.append(sums[1])
    (total, count), slope = jax.tree.map(lambda *x: sum(x), *zip(mean, grads, strict=True))
    return total / count, jax.tree.map(lambda g: g / count, slope)


def mean_of_means(weights, batch):
    def loss(w):
        return (lambda m: m.total / jnp.maximum(m.count, 1))(puzzles.squares(w, batch))

    return jax.lax.pmean(jax.value_and_grad(loss)(weights), "x")


def all_round(blocks):
    me, n = jax.lax.axis_index("x"), len(blocks)
    total = blocks[(me - 1) % n]
    for k in range(1, n):
        total = jax.lax.ppermute(total, "x", [(d, (d + 1) % n) for d in range(n)])
        total = total + blocks[(me - k - 1) % n]
    return total


def forwards_again(y):
    n = jax.lax.axis_size("x")
    edge = jax.lax.ppermute(y[:1], "x", [(d, (d + 1) % n) for d in range(n)])
    return y[1:].at[-1:].add(edge)


def copies_counted(grads, limit):
    norm = jnp.sqrt(psum(sum(jnp.sum(g**2) for g in grads.values())))
    return {name: g * jnp.minimum(1, limit / norm) for name, g in grads.items()}


def whole_first(grads, limit):
    whole = {k: jax.lax.all_gather(grads[k], "x", tiled=True) for k in "wv"} | {"b": grads["b"]}
    norm = psum(jnp.sqrt(sum(jnp.sum(g**2) for g in whole.values()))) / 8
    return {name: g * jnp.minimum(1, limit / norm) for name, g in grads.items()}


def placed_whole(tree, grid):
    on = NamedSharding(grid, P())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), tree)


BFLOAT16 = dict(dtype="bfloat16", reduce_dtype="float32")
WRONG = [
    ("smallest", "v5p:2x4x4", "it fits on 32 chips, and on 16 too"),
    ("smallest", "v5p:2x2x2", "of 95.7"),
    ("smallest", "v5e:16x16", "the slice is to be of v5p"),
    ("division", plan.Roles(fsdp=64, remat=True), "bound by fsdp"),
    ("division", plan.Roles(fsdp=32), "are 32 devices, and there are 64"),
    ("division", plan.Roles(data=64), "GiB of 15.75"),
    ("division", plan.Roles(tensor=64), "kv_heads"),
    ("division", plan.Roles(fsdp=64, microbatches=2), "none with 2 microbatches of 1 rows"),
    ("division", plan.Roles(stage=2, fsdp=32), "stages are left out"),
    ("split", plan.Roles(fsdp=4096, remat=True), "rows do not divide"),
    ("split", plan.Roles(fsdp=1024, context=4, remat=True), "bound by fsdp"),
    ("split", plan.Roles(fsdp=512, tensor=8, remat=True), "the best 1.3"),
    ("gather_seconds", functools.partial(over_sides, line=2), "on v5e (rings from 16)"),
    ("bands", P(("data", "model")), "device (0, 1) holds band 1, and should hold band 4"),
    ("bands", P("data"), "holds 0.25"),
    ("bands", P("data", "model"), "other than the rows"),
    ("bands", "data", "expected a PartitionSpec"),
    ("product", lambda i, j, k: (P(None, "model"), P("model", None)), "6,144 are enough"),
    ("product", lambda i, j, k: (P("model"), P()), "1 of B"),
    ("segments", lambda w, x: segmented(w, x, 1), "40 are enough"),
    ("segments", lambda w, x: segmented(w[:32], x), "the gradient"),
    ("accumulated", mean_of_means, "the mean is"),
    ("accumulated", every_part, "57,400 ring bytes; 14,350 are enough"),
    ("accumulated", lambda w, b: in_parts(w, b, 1), "bytes of temporaries"),
    ("table", TABLE | {"embed": None}, "and an eighth is"),
    ("table", dict.fromkeys(DECODER) | {"embed": ("data", "model")}, "ring bytes for an MLP"),
    ("table", TABLE | {"embed": "model"}, "can cut an array once"),
    ("table", {"vocab": None}, "no rule for"),
    ("born", lambda key: jax.random.uniform(key, (8, 128, 128)), "numbers are wrong"),
    (
        "born",
        lambda key: jax.vmap(lambda k: jax.random.uniform(k, (128, 128)))(jax.random.split(key, 8)),
        "65,536 are enough",
    ),
    ("target", lambda tree, grid: tree, "each is to hold"),
    ("target", placed_whole, "hold [12288]; each is to hold 3,072"),
    ("scatter", lambda b: jax.lax.psum_scatter(b, "x"), "by reduce-scatter; send them by"),
    ("scatter", all_round, "right values, 3 permutes on 4 devices; 2 are enough"),
    ("scatter", lambda b: b[0], "numbers are wrong"),
    (
        "one_order",
        lambda xs: jax.lax.psum_scatter(tree(xs), "x", tiled=True),
        "numbers are wrong on",
    ),
    ("one_order", lambda xs: jnp.sum(xs, 0), "on 1 devices"),
    ("one_order", gathered_as_a_tree, "512 are enough"),
    ("transpose", forwards_again, "⟨Ax, y⟩ is"),
    ("transpose", lambda y: y, "the shape is"),
    ("transpose", lambda y: y[1:], "⟨x, Aᵀy⟩ is"),
    ("gather", lambda x, w: (puzzles.layer(x, gathered(w)), None), "kept for the backward pass"),
    ("gather", lambda x, w: (puzzles.layer(x, w), None), "it raises"),
    ("clip", copies_counted, '"w" under limit 1 is'),
    ("clip", whole_first, "bytes of payload; 4 are enough"),
    ("settings", BFLOAT16 | dict(zero=1), "the budget is 2.9Ψ"),
    ("settings", BFLOAT16 | dict(zero=3), "8Ψ(n−1)/n sent; 4.5 are enough"),
    ("settings", dict(zero=2, dtype="bfloat16"), "summed in bfloat16"),
    ("settings", dict(zero=2, remat=True), "leave out ['remat']"),
    ("order", [LISTS[0], LISTS[1], LISTS[2].replace("F1 I1 W0 W1", "W0 F1 I1 W1")], "17 is"),
    ("order", ["F0 F1 F2 F3 I0 I1 I2 I3 W0 W1 W2 W3"] * 3, "4 microbatches live"),
    ("order", [LISTS[0].replace("F0 F1 I0", "I0 F0 F1"), *LISTS[1:]], "Deadlock"),
    ("order", LISTS[:2], "2 lists"),
    ("order", [LISTS[0] + " X9", *LISTS[1:]], "'X9' is no task"),
    ("boundaries", marked(2, 6), "54% of the parameters; at most half"),  # the two narrowest
    ("boundaries", marked(3, 6), "1,024 bytes a row; 896 are enough"),
    ("boundaries", marked(1, 2), "at most half"),
    ("boundaries", marked(3), "2 stages"),
]
STUBS = {name: (..., None, lambda *args: None, lambda *args: ...) for name in NAMES} | {
    "table": (..., dict.fromkeys(DECODER, ...)),
    **dict.fromkeys(["bands", "smallest", "division", "split"], (..., None)),
    "settings": (..., dict(zero=..., dtype=...)),
    "order": (..., ["...", "...", "..."]),
    "boundaries": (..., lambda *args: None, marked()),
}


def test_every_puzzle_has_a_solution_here():
    assert set(SOLUTIONS) == set(NAMES) and len(NAMES) == 19


@pytest.mark.parametrize("name", NAMES)
def test_a_stub_is_not_solved_yet_and_no_error(name):
    for stub in STUBS[name]:
        verdict = getattr(puzzles, name)(stub)
        assert verdict.solved is None and not verdict
        assert repr(verdict).startswith("Not solved yet: ")


DEAR = {"boundaries", "gather", "settings", "segments", "accumulated"}  # programs of some size


@pytest.mark.parametrize("name", sampling.marked(NAMES, set(NAMES) - DEAR))
def test_the_solution_solves(name):
    verdict = getattr(puzzles, name)(SOLUTIONS[name])
    assert verdict, verdict
    assert repr(verdict).startswith("Solved: ")


CHEAP = [wrong for wrong in WRONG if wrong[0] not in DEAR][::2]


@pytest.mark.parametrize(("name", "answer", "said"), sampling.marked(WRONG, CHEAP))
def test_a_wrong_answer_is_told_how(name, answer, said):
    verdict = getattr(puzzles, name)(answer)
    assert verdict.solved is False and said in verdict.text, verdict


def test_an_error_of_the_answer_is_told_and_not_raised():
    def fails(blocks):
        raise KeyError("no <such> key")

    verdict = puzzles.scatter(fails)
    assert verdict.solved is False and "it raises KeyError" in repr(verdict)
    assert "&lt;such&gt;" in verdict._repr_html_()


def test_what_an_answer_returns_is_handed_on_as_it_is():
    """Also what can be called: that it returns None then is no stub."""
    checker = judging.puzzle("write it")(lambda make: f"{make()(3)}")
    assert checker(lambda: lambda x: None).text == "None"
    assert checker(lambda: lambda x, *, by=2: by * x).text == "6"
    assert checker(lambda: None).solved is None


def test_seventeen_ticks_are_the_least_for_two_live():
    """All states that three devices can be in, tick by tick; no order with two live is shorter."""
    assert _least(devices=3, microbatches=4, most=2) == 17
    assert _least(devices=3, microbatches=4, most=3) == 14
    run = schedules.timeline(schedules.SCHEDULES["zb_h1"](3, 3, 4))
    assert run.makespan == 14 and max(run.peak_live) == 3


def _least(devices, microbatches, most):
    start, goal = ((0, 0, 0),) * devices, ((microbatches,) * 3,) * devices
    front, seen, ticks = {start}, {start}, 0
    while goal not in front:
        front = {s for state in front for s in _next(state, microbatches, most)} - seen
        seen |= front
        ticks += 1
    return ticks


def _next(state, microbatches, most):
    """States a tick later: each device runs an F, an I or a W, or waits."""
    choices = []
    for d, (f, i, w) in enumerate(state):
        can = [(f, i, w)]
        if f < microbatches and f - w < most and (d == 0 or state[d - 1][0] > f):
            can.append((f + 1, i, w))
        if i < f and (d == len(state) - 1 or state[d + 1][1] > i):
            can.append((f, i + 1, w))
        if w < i:
            can.append((f, i, w + 1))
        choices.append(can)
    return functools.reduce(lambda done, can: [(*s, c) for s in done for c in can], choices, [()])


def test_the_cheapest_cut_has_not_the_narrowest_array():
    """Of all pairs of marks; the one that takes the narrowest and then the least is not allowed."""
    widths = puzzles.steps.WIDTHS
    sizes = [a * b for a, b in itertools.pairwise(widths)]
    cheapest = {}
    for one, two in itertools.combinations(range(1, len(sizes)), 2):
        stages = sizes[:one], sizes[one:two], sizes[two:]
        if max(map(sum, stages)) <= sum(sizes) / 2:
            cheapest[one, two] = 4 * (widths[one] + widths[two])
    assert min(cheapest.values()) == puzzles.steps.LEAST == cheapest.pop((2, 4))
    assert min(cheapest.values()) == 4 * (96 + 32) == cheapest[3, 6]
    assert min(widths) == widths[6] and (2, 6) not in cheapest


def test_no_other_pair_of_specs_sends_less():
    """Of the four pairs that hold a quarter of each factor, each tried for one product's sizes."""
    told, ways = puzzles.product(cheapest).text, (P("model", None), P(None, "model"))
    for i, j, k in (256, 64, 32), (32, 64, 256), (16, 512, 16), (64, 64, 64):
        assert f"({i}×{j} by {j}×{k})" in told
        for pair in itertools.product(ways, ways):
            verdict = puzzles.product(
                lambda *s, p=pair, at=(i, j, k): p if s == at else cheapest(*s)
            )
            assert verdict.text == told or "are enough" in verdict.text
