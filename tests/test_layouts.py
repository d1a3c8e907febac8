"""Every layout, and every pair and triple of roles, is one device: losses, gradients, states."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import checkpoint, data, layouts, marks, measure, mesh, model, objective, train
from shardwise.layouts import catalogue

CONFIG = model.Config(
    embed=32, layers=4, heads=16, kv_heads=8, head_dim=2, mlp=48, dropout=0.1, remat=True
)
OPTIMIZERS = {
    "adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "adafactor": optax.chain(
        optax.clip_by_global_norm(0.1), optax.adafactor(1e-2, min_dim_size_to_factor=16)
    ),
}
KEY = jax.random.key(7)


@functools.cache
def parts(stages=1, layers=4, mixed=False):
    """(the loss, what creates the parameters) of a decoder with so many stages.

    A mixed one has experts, with a capacity that drops some choices.
    """
    config = dataclasses.replace(CONFIG, stages=stages, layers=layers)
    if mixed:
        mixture = dict(experts=8, experts_per_token=2, capacity_factor=0.75, mlp=16, dropout=0.0)
        config = dataclasses.replace(config, **mixture)
    graphdef = nnx.split(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))[0]
    loss = train.routed_loss if mixed else train.loss
    return functools.partial(loss, graphdef=graphdef), functools.partial(_create, config)


def _create(config, key):
    return nnx.state(model.Decoder(config, nnx.Rngs(params=key)))


@functools.cache
def batches():
    """Two batches of real bytes, padded at random, one row wholly masked."""
    found, rng = [], np.random.default_rng(3)
    for batch in itertools.islice(data.batches(16, 32, seed=1), 2):
        real = rng.integers(1, 33, 16)
        real[5] = 0
        found.append(batch | {"mask": (np.arange(32)[None] < real[:, None]).astype(np.float32)})
    return found


@functools.cache
def one_device(optimizer, layers=4, mixed=False):
    """[(what a step returns beside the parameters, and its state)] of each step."""
    loss, create = parts(1, layers, mixed)
    tx, params = OPTIMIZERS[optimizer], jax.jit(create)(KEY)
    opt_state, found = tx.init(params), []

    @jax.jit
    def step(params, opt_state, batch, key):
        out, grads = objective.value_and_grad(loss, has_aux=mixed)(params, batch, key=key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, out

    for i, batch in enumerate(batches()):
        params, opt_state, out = step(params, opt_state, batch, jax.random.key(i))
        found.append((jax.tree.leaves(out), jax.tree.map(np.asarray, opt_state)))
    return found


def check(layout, optimizer="adamw"):
    """Two steps, with padding and dropout: losses, and the state after the first step, which has
    the gradients in it, as one device has them.
    """
    layers, mixed = max(4, layout.size("stage")), bool(layout.expert)
    loss, create = parts(layout.size("stage"), layers, mixed)
    tx, theirs = OPTIMIZERS[optimizer], one_device(optimizer, layers, mixed)
    params, opt_state = layouts.init(layout, create, tx, KEY, loss, batches()[0], mixed)
    step = layouts.step(layout, loss, tx, has_aux=mixed)
    for i, (batch, (expected, state)) in enumerate(zip(batches(), theirs, strict=True)):
        params, opt_state, *out = step(params, opt_state, batch, key=jax.random.key(i))
        for a, b in zip(jax.tree.leaves(out), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5)
        if mixed and i == 0:
            assert out[1]["dropped"].sum() > 0  # or the capacity would not be seen
        if i == 0:  # later ones differ by more: Adam amplifies rounding
            ours = jax.tree.leaves(layouts.whole(layout, opt_state))
            for a, b in zip(ours, jax.tree.leaves(state), strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6 * (1 + np.abs(b).max()))


FAST = {"zero2", "hybrid", "zigzag", "fsdp, context, tensor", "fsdp, tensor by compiler"}
FAST |= {"fsdp, expert, context"}


def marked(cases, fast):
    """The cases, slow but for these."""
    return [c if c in fast else pytest.param(c, marks=pytest.mark.slow) for c in cases]


@pytest.mark.parametrize("name", marked(layouts.LAYOUTS, FAST))
def test_a_layout_is_one_device(name):
    optimizer = "adafactor" if len(name) % 2 and "stage" not in name else "adamw"
    check(layouts.LAYOUTS[name](8), optimizer)


BY_HAND = ("data", "fsdp", "expert", "context", "tensor")
COMBINED = [
    (*roles, by)
    for by, known in (("hand", BY_HAND), ("compiler", ("stage", *BY_HAND)))
    for size in (2, 3)
    for roles in itertools.combinations(known, size)
]
PAIRS = {("data", "context", "hand"), ("stage", "data", "context", "compiler")}


@pytest.mark.parametrize("case", marked(COMBINED, PAIRS), ids=lambda case: "-".join(case))
def test_roles_combine(case):
    *roles, by = case
    parts = 4 if "stage" in roles else 1 if "expert" in roles else 2  # balance is over the batch
    settings = dict(microbatches=parts, by=by)
    if by == "hand" and "context" in roles:
        settings["attention"] = "zigzag" if "fsdp" in roles else "ulysses"
    n = 4 if case in PAIRS else 8
    check(catalogue.over(tuple(roles), n, **settings))


def test_printing_a_layout_tells_what_each_axis_does():
    told = str(layouts.LAYOUTS["fsdp, context, tensor"](8))
    for words in ("by hand", "gathered where it is used", "attention by ring", "heads", "context"):
        assert words in told
    assert layouts.LAYOUTS["fsdp"](8) == layouts.LAYOUTS["fsdp"](8)
    assert len({layouts.LAYOUTS["fsdp"](8), layouts.LAYOUTS["fsdp"](8)}) == 1


GRID = functools.partial(mesh.make, a=2, b=2)
MISTAKES = {
    "no role": (lambda: layouts.Layout(GRID(), fsdp="a"), "axis 'b' of size 2 has no role"),
    "two roles": (lambda: layouts.Layout(GRID(), fsdp="a", data=("a", "b")), "given to data and"),
    "no axis": (lambda: layouts.Layout(GRID(), fsdp="a", data="c"), "no such axis; it has"),
    "by": (lambda: layouts.Layout(GRID(), data=("a", "b"), by="magic"), "'hand', 'compiler'"),
    "zero": (lambda: layouts.Layout(GRID(), data=("a", "b"), zero=4), "zero=4"),
    "sequence": (
        lambda: layouts.Layout(GRID(), data=("a", "b"), sequence=True),
        "name one, tensor=",
    ),
    "hand in stages": (
        lambda: layouts.Layout(GRID(), stage="a", fsdp="b"),
        "stages and fsdp by hand.*Say by='compiler'",
    ),
    "order": (
        lambda: layouts.Layout(GRID(), data="a", context="b", by="compiler", attention="zigzag"),
        "'zigzag' is an order",
    ),
    "many stages": (lambda: layouts.Layout(GRID(), stage=("a", "b")), "lie along one axis"),
    "microbatches": (lambda: layouts.Layout(GRID(), data=("a", "b"), microbatches=0), "1 or more"),
    "devices": (lambda: catalogue.over(("fsdp", "tensor", "context"), 6), "a multiple of 4"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name):
    make, told = MISTAKES[name]
    with pytest.raises(ValueError, match=told):
        make()


def run(layout, loss, params, batch):
    placed = layouts.place(layout, params, loss, batch)
    return layouts.value_and_grad(layout, loss)(placed, batch)


def tokens(rows, length):
    whole = np.zeros((rows, length), np.int32)
    return {"tokens": whole, "targets": whole, "mask": whole.astype(np.float32)}


def test_rows_and_sequences_have_to_divide():
    loss, create = parts(1)
    params = jax.eval_shape(create, KEY)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    for by in ("hand", "compiler"):
        layout = catalogue.over(("fsdp", "context"), 8, by=by)
        with pytest.raises(ValueError, match=r"\(6, 32\) does not split into 4 parts"):
            run(layout, loss, params, tokens(6, 32))
        with pytest.raises(ValueError, match=r"pad it.* 32"):
            run(layout, loss, params, tokens(8, 31))


def test_heads_have_to_divide():
    _, create = parts(1)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(create, KEY))
    odd = dataclasses.replace(layouts.LAYOUTS["tensor"](8), cut=("head_dim",))
    with pytest.raises(ValueError, match=r"'head_dim'.* of 2 does not divide"):
        layouts.place(odd, params)
    with pytest.raises(ValueError, match="no parameter carries one of the logical axes"):
        layouts.place(dataclasses.replace(odd, cut=("experts",)), params)


def test_a_mean_over_rows_is_refused_where_the_sequence_is_cut():
    def loss(params, batch):
        x = (batch["tokens"] * params["w"])[:, :, None, None]
        x = marks.attend(x, x, x, marks.places(batch, *x.shape[:2]))
        return jnp.mean(jnp.max(x, axis=1))

    layout = layouts.LAYOUTS["ring"](8)
    with pytest.raises(ValueError, match=r"Return objective.Mean\(total, count\)"):
        run(layout, loss, {"w": jnp.ones(())}, tokens(8, 32))


RESTORED = [
    ("fsdp", "fsdp, tensor by compiler"),
    ("fsdp, context, tensor", "zero1"),
    ("tensor", "stage, fsdp"),
]


@pytest.mark.slow
@pytest.mark.parametrize("pair", RESTORED, ids=" to ".join)
def test_a_checkpoint_restores_under_another_layout(pair, tmp_path):
    first, second = (layouts.LAYOUTS[name](8) for name in pair)
    tx, batch = OPTIMIZERS["adamw"], batches()[0]

    def born(layout, key):
        loss, create = parts(layout.size("stage"))
        return dict(
            zip(
                ("params", "opt_state"),
                layouts.init(layout, create, tx, key, loss, batch),
                strict=True,
            )
        )

    saved = born(first, KEY)
    checkpoint.save(tmp_path, 1, saved)
    restored = checkpoint.restore(tmp_path, born(second, jax.random.key(99)), 1)
    for name, tree in saved.items():
        ours = layouts.whole(second, restored[name]), layouts.whole(first, tree)
        for a, b in zip(*map(jax.tree.leaves, ours), strict=True):
            np.testing.assert_array_equal(a, b)


EXACT = ["data", "zero1", "zero2", "fsdp", "hybrid", "ring", "zigzag", "all_gather", "ulysses"]


@pytest.mark.parametrize("name", [*EXACT, "fsdp, context"])
def test_bytes_on_axes_by_hand_are_the_formula(name):
    layout, (loss, create) = layouts.LAYOUTS[name](8), parts()
    params, batch = jax.eval_shape(create, KEY), batches()[0]
    predicted = layouts.predict(layout, params, batch, OPTIMIZERS["adamw"], remat=CONFIG.remat)
    placed = jax.eval_shape(lambda key: layouts.place(layout, create(key)), KEY)
    lowered = layouts.value_and_grad(layout, loss).lower(placed, batch, key=KEY)
    counted = sum(op.ring_bytes for op in measure.collectives(lowered).ops)
    np.testing.assert_allclose(sum(predicted.sent.values()), counted, rtol=1e-9)


def test_bytes_held_are_the_formula():
    layout, (_, create) = layouts.LAYOUTS["fsdp, context, tensor"](8), parts()
    tx, batch = OPTIMIZERS["adamw"], batches()[0]
    predicted = layouts.predict(layout, jax.eval_shape(create, KEY), batch, tx)
    params, opt_state = layouts.init(layout, create, tx, KEY)
    for tree, name in ((params, "parameters"), (opt_state, "state")):
        held = set(measure.bytes_on_devices(tree).values())
        assert held == {predicted.held[name]}
    assert ("model",) not in predicted.sent and predicted.sent[("tensor",)] > 0


def with_statistics(params, batch):
    """A plain tree's loss, with a bias that balances and a running mean, both without gradients."""
    x = marks.stage_boundary(batch["x"] @ params["w"]) + params["bias"][None]
    new = {
        "bias": params["bias"] - 0.1 * jnp.sign(marks.total(jnp.sum(x, axis=0))),
        "mean": 0.9 * params["mean"] + 0.1 * jnp.mean(batch["x"], axis=0),
    }
    found = {"frozen": new, "rows": jnp.float32(len(x))}
    return objective.Mean(jnp.sum((x - params["mean"][:3][None]) ** 2), jnp.float32(len(x))), found


@pytest.mark.parametrize("name", ["fsdp", "hybrid", "fsdp by compiler", "stage"])
def test_what_changes_without_a_gradient_is_put_back(name):
    layout = layouts.LAYOUTS[name](2 if name == "stage" else 8)
    layout = dataclasses.replace(layout, microbatches=1, min_size=0 if layout.by_hand else 100)
    rng = np.random.default_rng(0)
    params = {"bias": np.zeros(3), "mean": np.ones(7), "w": rng.normal(size=(7, 3))}
    params = {path: jnp.float32(x) for path, x in params.items()}
    batch, tx = {"x": np.float32(rng.normal(size=(16, 7)))}, optax.adamw(0.1)
    frozen = {"bias", "mean"}.__contains__

    def create(key):
        return jax.tree.map(jnp.asarray, params)

    ours, state = layouts.init(layout, create, tx, KEY, with_statistics, batch, True)
    step = layouts.step(layout, with_statistics, tx, frozen=frozen)
    theirs, expected = params, tx.init(params)
    for _ in range(3):
        ours, state, mean, aux = step(ours, state, batch)
        grad = jax.value_and_grad(lambda p: _divided(with_statistics(p, batch)), has_aux=True)
        (value, found), grads = grad(theirs)
        updates, expected = tx.update(grads, expected, theirs)
        theirs = optax.apply_updates(theirs, updates) | found["frozen"]
        np.testing.assert_allclose(mean, value, rtol=1e-5)
        assert aux == {"rows": 16}
    for path, x in layouts.whole(layout, ours).items():
        np.testing.assert_allclose(x, theirs[path], rtol=1e-4, atol=1e-6, err_msg=path)


def _divided(out):
    mean, aux = out
    return mean.total / mean.count, aux


def test_new_values_of_other_arrays_are_refused():
    layout = layouts.LAYOUTS["fsdp"](8)
    params = {"bias": jnp.zeros(3), "mean": jnp.zeros(7), "w": jnp.zeros((7, 3))}
    placed, batch = layouts.place(layout, params), {"x": jnp.zeros((16, 7))}
    tx = optax.sgd(0.1)
    step = layouts.step(layout, with_statistics, tx, frozen=lambda path: path == "bias")
    with pytest.raises(ValueError, match=r"names \{'bias': \(3,\)\}, and the loss returns new"):
        step(placed, layouts.init(layout, lambda key: params, tx, KEY)[1], batch)


def rolled(params, batch):
    targets = jnp.roll(batch["tokens"], -1, axis=1)
    return each(params, batch, params["w"] * batch["tokens"] - targets)


def shifted(params, batch):
    x = params["w"] * batch["tokens"]
    return objective.Mean(jnp.sum((x[:, :-1] - batch["targets"][:, 1:]) ** 2), jnp.float32(len(x)))


def each(params, batch, x):
    x = x[:, :, None, None]
    x = marks.attend(x, x, x, marks.places(batch, *x.shape[:2]))[:, :, 0, 0]
    return objective.Mean(jnp.sum(x**2 * batch["mask"]), jnp.sum(batch["mask"]))


def looped(params, batch):
    def token(carry, x):
        return carry + x, carry * params["w"]

    _, x = jax.lax.scan(token, jnp.zeros(len(batch["mask"])), batch["mask"].T)
    return each(params, batch, x.T)


SEEING = {
    "a shift": (shifted, "a slice takes a part of the sequence"),
    "a roll": (rolled, "takes a part of the sequence"),
    "a running sum": (
        lambda p, b: each(p, b, jnp.cumsum(b["mask"] * p["w"], axis=1)),
        "cumsum goes along the sequence",
    ),
    "a mean": (
        lambda p, b: each(p, b, b["mask"] * p["w"] - jnp.mean(b["mask"], axis=1, keepdims=True)),
        "goes back to the tokens",
    ),
    "a maximum": (
        lambda p, b: each(p, b, b["mask"] * jnp.max(b["mask"] * p["w"], axis=1)[:, None]),
        "reduce_max takes one number of a sequence",
    ),
    "own attention": (
        lambda p, b: each(
            p, b, jnp.einsum("bs,bt,bt->bs", b["mask"] * p["w"], b["mask"], b["mask"])
        ),
        "goes back to the tokens",
    ),
    "scores": (
        lambda p, b: each(
            p,
            b,
            jnp.max(b["mask"][:, :, None] * b["mask"][:, None] * p["w"], axis=2),
        ),
        "compares tokens with tokens",
    ),
    "own positions": (
        lambda p, b: each(p, b, b["mask"] * jnp.sin(p["w"] * jnp.arange(b["mask"].shape[1]))[None]),
        r"numbered by jnp\.arange",
    ),
    "a table of positions": (
        lambda p, b: each(
            p, b, b["mask"] * (p["w"] * jnp.ones(64))[jnp.arange(b["mask"].shape[1])][None]
        ),
        r"numbered by jnp\.arange",
    ),
    "a length": (
        lambda p, b: each(
            p,
            b,
            p["w"] * (jnp.arange(b["mask"].shape[1])[None] < b["rows"][:, None]),
        ),
        r"numbered by jnp\.arange",
    ),
    "a loop": (looped, "a loop goes over the sequence"),
    "a square": (
        lambda p, b: objective.Mean(
            jnp.sum(jnp.sum(p["w"] * b["mask"], axis=1) ** 2),
            jnp.sum(b["mask"]),
        ),
        "of a sum over tokens is no sum",
    ),
    "rows": (
        lambda p, b: each(p, b, b["mask"] * p["w"])._replace(total=jnp.sum(b["rows"] * p["w"])),
        "the total is no sum over tokens",
    ),
}


@pytest.mark.parametrize("name", SEEING)
def test_tokens_that_see_each_other_outside_marks_are_refused(name):
    loss, told = SEEING[name]
    batch = tokens(8, 32) | {"rows": np.ones(8, np.float32)}
    with pytest.raises(ValueError, match=told):
        run(
            dataclasses.replace(layouts.LAYOUTS["fsdp, context"](8), stacked=None),
            loss,
            {"w": jnp.ones(())},
            batch,
        )


def test_what_sees_no_other_token_runs():
    layout, params = layouts.LAYOUTS["fsdp, context"](8), {"w": jnp.float32(0.5)}
    batch = next(data.batches(8, 32)) | {"rows": np.arange(8, dtype=np.float32)}

    def loss(params, batch):
        size = batch["mask"].shape[1]
        x = jnp.sin(params["w"] * marks.index("sequence", size))[None] * batch["rows"][:, None]
        return each(
            params, batch, x + jnp.flip(x[:, :, None] * jnp.ones((1, 1, 3)), 2).mean(axis=2)
        )

    value, grads = run(layout, loss, params, batch)
    expected = objective.value_and_grad(loss)(params, batch)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(layouts.whole(layout, grads)["w"], expected[1]["w"], rtol=1e-4)
