import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from sampling import marked

from shardwise import data, fsdp, layouts, marks, measure, mesh, model, objective, rules
from shardwise.fsdp import gathering, gradients
from shardwise.fsdp.arrays import array_layouts

mesh.simulate(8)
LINE, GRID = mesh.make(fsdp=8), mesh.make(data=2, fsdp=4)
ALL_LAYERS = fsdp.rule(stacked=lambda path: True)


def assert_close(ours, theirs, rtol=1e-5):
    """Relative to each leaf's largest entry: sums over devices are taken in another order."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(initial=0), 1e-6))


def loss(params, batch):
    """Uses every entry of any tree, smoothly; one leaf twice."""
    leaves = [jnp.asarray(p, jnp.float32) for p in jax.tree.leaves(params)]
    s = sum(jnp.sum(jnp.sin(p * (i + 1))) for i, p in enumerate(leaves))
    s /= 1 + sum(p.size for p in leaves) ** 0.5  # tanh must not saturate
    c = sum(jnp.sum(jnp.cos(p)) for p in leaves) + jnp.sum(leaves[0] ** 2)
    each = jnp.tanh(batch["x"] * s) + 0.01 * c * batch["x"] ** 2
    return objective.Mean(jnp.sum(each * batch["mask"]), jnp.sum(batch["mask"]))


def tree_of(shapes, seed=0, dtypes=("float32",)):
    draw, dtypes = np.random.default_rng(seed), itertools.cycle(map(jnp.dtype, dtypes))
    arrays = [(draw.normal(size=shape) * 0.3).astype(next(dtypes)) for shape in shapes]
    return {"first": arrays[0], "rest": tuple(arrays[1:])}


def rows(count, seed=0):
    draw = np.random.default_rng(seed)
    x, mask = draw.uniform(0.1, 2, size=count), draw.integers(0, 2, count)  # nothing cancels
    mask[0] = 1
    return {"x": x.astype(np.float32), "mask": mask.astype(np.float32)}


def place(tree, m=LINE, rule=None):
    return rules.place(tree, rule or fsdp.rule(), m)


def check(tree, batch, m=LINE, min_size=0, rtol=1e-5, expected=None, **options):
    """Equal to one device, and each gradient lies as its parameter."""
    parts, rule = m.size * options.get("microbatches", 1), fsdp.rule(min_size=min_size)
    expected = expected or jax.jit(objective.value_and_grad(loss))(tree, batch)
    params = place(tree, m, rule)
    mean, grads = fsdp.value_and_grad(loss, m, rule, **options)(params, fsdp.pad(batch, parts))
    assert_close((mean, grads), expected, rtol)
    for x, g in zip(jax.tree.leaves(params), jax.tree.leaves(grads), strict=True):
        assert g.dtype == x.dtype and g.sharding.is_equivalent_to(x.sharding, x.ndim)


SIZES = st.sampled_from([8, 5, 12, 7, 16, 10, 3, 4, 1, 0])  # of which 2, 4, 5 and 8 divide some
SHAPES = st.lists(st.lists(SIZES, max_size=3).map(tuple), min_size=1, max_size=4)


@given(
    shapes=SHAPES.map(lambda shapes: [(3,), *shapes]),
    count=st.integers(1, 40),
    zero=st.sampled_from([1, 2, 3]),
    microbatches=st.sampled_from([1, 3]),
    where=st.sampled_from(
        [
            dict(m=LINE),
            dict(m=GRID, replicate=("data",)),
            dict(m=mesh.make(fsdp=2, data=3), replicate=("data",)),
            dict(m=mesh.make(fsdp=5)),
            dict(m=mesh.make(fsdp=1)),
        ]
    ),
    min_size=st.sampled_from([0, 20]),
    dtypes=st.sampled_from([("float32",), ("float32", "bfloat16")]),
)
@settings(max_examples=8)
def test_any_tree_and_any_batch_equal_one_device(
    shapes, count, zero, microbatches, where, min_size, dtypes
):
    rtol = 1e-5 if len(dtypes) == 1 else 1e-2  # a gradient has its parameter's dtype
    how = dict(min_size=min_size, zero=zero, microbatches=microbatches, rtol=rtol)
    check(tree_of(shapes, dtypes=dtypes), rows(count), **where, **how)


@given(shapes=SHAPES, n=st.sampled_from([8, 2, 1]))
@settings(max_examples=30)
def test_an_array_is_cut_where_an_axis_divides_and_told_where_none_does(shapes, n):
    tree, layout = tree_of(shapes), layouts.Layout(mesh.make(fsdp=n), fsdp="fsdp")
    params = layouts.place(layout, tree)
    whole = {}
    for (path, x), original in zip(rules.named_leaves(params), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(x, original)
        held = [shard.data.nbytes for shard in x.addressable_shards]
        divides = x.size > 1 and any(size % n == 0 for size in x.shape)
        assert set(held) == {x.nbytes // n if divides else x.nbytes}, path
        if n > 1 and x.size > 1 and not divides:
            whole[path] = round(x.nbytes * (1 - 1 / n))
    warns = sum(whole.values()) > 0.05 * sum(x.nbytes for x in jax.tree.leaves(tree))
    message = rf"{len(whole)} of {len(shapes)} arrays stay whole on all {n} devices along fsdp"
    told = pytest.warns(UserWarning, match=message) if warns else contextlib.nullcontext()
    with told:
        found = layouts.predict(layout, tree, rows(8))
    assert found.whole == whole
    assert {found.held["parameters"]} == {*measure.bytes_on_devices(params).values()} or not shapes
    with pytest.warns(UserWarning, match=message) if warns else contextlib.nullcontext():
        described = layouts.describe(layout, tree)
    assert described.bytes_per_device == found.held["parameters"]
    assert {p for p, why in described.replicated.items() if "no axis divides" in why} == {*whole}


# The decoder, whose layers are gathered one at a time.


@functools.cache
def decoder(remat, scan=True):
    config = model.Config(
        embed=24, layers=3, heads=3, kv_heads=3, head_dim=6, mlp=37, remat=remat, scan=scan
    )
    graphdef, params = nnx.split(nnx.jit(lambda: model.Decoder(config, nnx.Rngs(0)))())
    return functools.partial(model.loss, graphdef=graphdef), params


@pytest.mark.parametrize(
    ("remat", "scan"),
    [
        (True, True),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
    ],
)
def test_the_decoder_equals_one_device_at_the_textbook_cost(remat, scan):
    function, params = decoder(remat, scan)
    batch = fsdp.pad(next(data.batches(5, 16)), 8)
    expected = jax.jit(objective.value_and_grad(function))(params, batch)
    sharded = place(params)
    compiled = fsdp.value_and_grad(function, LINE).lower(sharded, batch).compile()
    assert_close(compiled(sharded, batch), expected)
    counted = measure.collectives(compiled)
    if not scan:
        return  # unrolled, XLA may share or undo gathers
    arrays = array_layouts(params, fsdp.rule(), LINE)
    pairs = zip(arrays, jax.tree.leaves(params), strict=True)
    stored = {s.path: x.nbytes for s, x in pairs if s.cut is not None}
    psi = sum(stored.values())
    layers = sum(size for path, size in stored.items() if path.startswith("blocks/"))
    assert counted["reduce-scatter"].ring_bytes == psi * 7 / 8
    assert counted["all-gather"].ring_bytes == (psi + (layers if remat else 0)) * 7 / 8


def test_a_plain_dict_with_a_scan_and_dropout_keys():
    def network(params, batch, key):
        def layer(x, w):
            w = marks.use(w)
            return jnp.tanh(x @ w["kernel"] + w["bias"][None]), None

        x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], params["layers"])
        noise = jax.random.normal(key, x.shape[:1])
        total = jnp.sum((x @ params["out"]) ** 2, axis=1)
        mean = objective.Mean(jnp.sum(total), jnp.float32(len(x)))
        return mean, {"noise": jnp.sum(noise), "rows": len(x)}

    draw = np.random.default_rng(0)
    params = {
        "layers": {"kernel": draw.normal(size=(4, 8, 8)), "bias": draw.normal(size=(4, 8))},
        "out": draw.normal(size=(8, 5)),
    }
    params = jax.tree.map(lambda x: np.float32(x / 2), params)
    batch = {"x": draw.normal(size=(16, 8)).astype(np.float32)}

    def alone(params, batch):
        return network(params, batch, key=jax.random.key(0))[0]

    expected = jax.jit(objective.value_and_grad(alone))(params, batch)
    rule = fsdp.rule(stacked=lambda path: path.startswith("layers/"))
    sharded = place(params, rule=rule)
    run = fsdp.value_and_grad(network, LINE, rule, has_aux=True)
    (mean, aux), grads = run(sharded, batch, key=jax.random.key(0))
    assert_close((mean, grads), expected)
    assert aux["rows"] == 16
    mixed = fsdp.value_and_grad(
        network, LINE, rule, has_aux=True, dtype="bfloat16", reduce_dtype="float32"
    )
    (mean, _), grads = mixed(sharded, batch, key=jax.random.key(0))
    assert_close((mean, grads), expected, rtol=0.1)
    assert {str(g.dtype) for g in jax.tree.leaves(grads)} == {"float32"}
    lowered = mixed.lower(sharded, batch, key=jax.random.key(0)).as_text()
    assert "bf16" in lowered and "reduce_scatter" in lowered
    devices = [jax.random.fold_in(jax.random.key(0), i) for i in range(8)]
    np.testing.assert_allclose(
        aux["noise"], sum(jax.random.normal(k, (2,)).sum() for k in devices), rtol=1e-5
    )


def test_a_scalar_loss_is_a_mean_over_rows():
    tree, batch = tree_of([(5, 8), (3,)]), rows(16)

    def mean(params, batch):
        return loss(params, batch).total / len(batch["x"])

    found = fsdp.value_and_grad(mean, LINE)(place(tree), batch)
    assert_close(found, jax.jit(jax.value_and_grad(mean))(tree, batch))


def test_a_shared_variable_is_one_array():
    class Tied(nnx.Module):
        def __init__(self):
            draw = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
            self.embed = self.head = nnx.Param(jnp.asarray(draw))

    graphdef, params = nnx.split(Tied())

    def run(params, batch):
        tied = nnx.merge(graphdef, params)
        x = jnp.tanh(batch["x"][:, None, None] * tied.embed[...][None])
        return objective.Mean(jnp.sum((x @ tied.head[...].T) ** 2), jnp.float32(len(batch["x"])))

    sharded = place(params)
    assert len(jax.tree.leaves(sharded)) == 1
    found = fsdp.value_and_grad(run, LINE)(sharded, rows(8))
    assert_close(found, jax.jit(objective.value_and_grad(run))(params, rows(8)))


# Optimizers.

OPTIMIZERS = {
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2)),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=128),
    "dadapt": optax.contrib.dadapt_adamw(1.0),
    "muon": optax.contrib.muon(1e-2),
}


def on_one(tx, tree, batch, steps=3):
    """Parameters after several steps."""

    @jax.jit
    def step(params, state):
        grads = objective.value_and_grad(loss)(params, batch)[1]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = tree, jax.jit(tx.init)(tree)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def check_steps(tx, tree, batch, expected, m=LINE, steps=3, **options):
    """Parameters after several steps of plain optax equal one device's."""
    batch = fsdp.pad(batch, m.size)

    @jax.jit
    def step(params, state):
        grads = fsdp.value_and_grad(loss, m, **options)(params, batch)[1]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = place(tree, m)
    state = jax.jit(tx.init)(params)
    for _ in range(steps):
        params, state = step(params, state)
    assert_close(params, expected, rtol=1e-4)


UNEVEN = tree_of([(131, 136), (144, 131), (131, 137), (7,), (3, 5, 2), ()])


@pytest.mark.parametrize("name", marked(OPTIMIZERS, {"clipped adam", "adafactor", "muon"}))
def test_every_optimizer_equals_one_device_in_true_shapes(name):
    tx, batch = OPTIMIZERS[name], fsdp.pad(rows(13), 8)
    layout = layouts.Layout(LINE, fsdp="fsdp")
    params, state = layouts.init(layout, lambda key: UNEVEN, tx, jax.random.key(0))
    wanted = layouts.shardings(layout, UNEVEN, tx)
    shapes = UNEVEN, jax.eval_shape(tx.init, UNEVEN)
    held = [sum(s.data.nbytes for s in x.addressable_shards) for x in jax.tree.leaves(state)]
    with pytest.warns(UserWarning, match="stay whole .* the largest is rest/1"):
        assert layouts.predict(layout, UNEVEN, batch, tx).held["state"] == sum(held) // 8
    step = layouts.step(layout, loss, tx)
    for _ in range(3):
        params, state, _ = step(params, state, batch)
    assert_close(params, on_one(tx, UNEVEN, rows(13)), rtol=1e-4)
    trees = zip(*map(jax.tree.leaves, ((params, state), wanted, shapes)), strict=True)
    for x, sharding, shape in trees:
        assert x.shape == shape.shape and x.sharding.is_equivalent_to(sharding, x.ndim)
    cut = {x.shape for x in jax.tree.leaves((params, state)) if not x.is_fully_replicated}
    assert {(131, 136), (144, 131)} <= cut and (131, 137) not in cut


@given(
    name=st.sampled_from(["clipped adam", "lamb", "adafactor", "muon"]),
    shapes=st.lists(st.lists(SIZES.filter(bool), max_size=2).map(tuple), min_size=1, max_size=3),
    count=st.integers(1, 20),
    where=st.sampled_from([dict(), dict(m=GRID, replicate=("data",)), dict(m=mesh.make(fsdp=3))]),
    zero=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=4)
def test_random_trees_train_as_on_one_device(name, shapes, count, where, zero):
    """Factored from 4 on, so that Adafactor's small matrices have factored moments too."""
    small = dict(adafactor=optax.adafactor(1e-2, min_dim_size_to_factor=4))
    tx, tree = (OPTIMIZERS | small)[name], tree_of([(3,), (8, 12), *shapes])
    expected = on_one(tx, tree, rows(count), 2)
    check_steps(tx, tree, rows(count), expected, steps=2, zero=zero, **where)


def test_arrays_may_be_born_in_shards():
    def create(key):
        return {"w": jax.random.uniform(key, (136, 5))}

    born = layouts.init(layouts.Layout(LINE, fsdp="fsdp"), create, optax.sgd(1), jax.random.key(0))
    assert born[0]["w"].addressable_shards[0].data.shape == (17, 5)
    np.testing.assert_array_equal(born[0]["w"], jax.jit(create)(jax.random.key(0))["w"])


# Mixed precision and growth.


def test_bytes_follow_the_dtypes_asked_for():
    tree = tree_of([(64, 64), (16,)])
    sharded, batch = place(tree), rows(8)
    psi = sum(x.nbytes for x in jax.tree.leaves(tree))
    for dtype, reduce_dtype, gathers, reduces in [
        (None, None, 1, 1),
        ("bfloat16", None, 0.5, 0.5),
        ("bfloat16", "float32", 0.5, 1),
    ]:
        run = fsdp.value_and_grad(loss, LINE, dtype=dtype, reduce_dtype=reduce_dtype)
        counted = measure.collectives(run.lower(sharded, batch))
        assert counted["all-gather"].ring_bytes == gathers * psi * 7 / 8
        assert counted["reduce-scatter"].ring_bytes == reduces * psi * 7 / 8
        mean, grads = run(sharded, batch)
        assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))
        assert_close(
            (mean, grads),
            jax.jit(objective.value_and_grad(loss))(tree, batch),
            rtol=1e-5 if dtype is None else 0.1,
        )


def test_zeros_numbers_and_accumulation_send_what_zero_says():
    tree = tree_of([(64, 64), (16,)])
    sharded, batch = place(tree), rows(32)
    psi = sum(x.nbytes for x in jax.tree.leaves(tree)) * 7 / 8
    for zero, gathers, reduces in [(1, 1, 1), (2, 1, 4), (3, 4, 4)]:
        run = fsdp.value_and_grad(loss, LINE, zero=zero, microbatches=4)
        # As asked for: XLA may move a gather that is the same for all microbatches out of the loop.
        counted = measure.collectives(run.lower(sharded, batch))
        assert counted["all-gather"].ring_bytes == gathers * psi
        assert counted["reduce-scatter"].ring_bytes == reduces * psi


def test_copies_of_the_shards_cost_an_all_reduce_of_a_share():
    """Hybrid sharding: gathers and scatters among 4, then a share summed between the 2 copies."""
    tree = tree_of([(64, 64), (16,)])
    run = fsdp.value_and_grad(loss, GRID, replicate=("data",))
    counted = measure.collectives(run.lower(place(tree, GRID), rows(8)).compile())
    psi = sum(x.nbytes for x in jax.tree.leaves(tree))
    assert counted["all-gather"].ring_bytes == psi * 3 / 4
    assert counted["reduce-scatter"].ring_bytes == psi * 3 / 4
    total_and_count = 2 * 2 * 4 * 7 / 8
    assert counted["all-reduce"].ring_bytes == 2 * (psi / 4) * 1 / 2 + total_and_count


# A stack of layers, as deep as one likes: what is in flight, and what is sent.

WIDE = 64
LAYER = 4 * WIDE * WIDE


def stack(depth, checkpoint=jax.checkpoint, gather_within=True, whole=lambda loss: loss):
    """The compiled loss and gradient of `depth` layers of LAYER bytes, on one row per device."""

    def layer(x, w):
        return jnp.tanh(x @ (marks.use(w) if gather_within else w))

    def body(x, w):
        return checkpoint(layer)(x, w if gather_within else marks.use(w)), None

    def run(params, batch):
        x = jax.lax.scan(body, batch["x"], params["w"])[0]
        return objective.Mean(jnp.sum(x**2), jnp.float32(len(x)))

    params = {"w": np.ones((depth, WIDE, WIDE), np.float32)}
    batch = {"x": np.ones((8, WIDE), np.float32)}
    function = fsdp.value_and_grad(whole(run), LINE, ALL_LAYERS)
    return function.lower(place(params, rule=ALL_LAYERS), batch).compile()


def kept_per_layer(**how):
    """By how many bytes temporaries grow with each further layer."""
    few, many = (measure.bytes_per_device(stack(depth, **how)).temporaries for depth in (8, 24))
    return (many - few) / 16


def test_weights_in_flight_do_not_grow_with_depth_and_bytes_sent_do():
    """A further layer keeps its input, and its part of the gradient until the step's end."""
    assert kept_per_layer() <= 4 * WIDE + LAYER / 8 + 64
    for depth in 3, 6:
        sent = measure.collectives(stack(depth))
        assert sent["all-gather"].ring_bytes == 2 * depth * LAYER * 7 / 8
        assert sent["reduce-scatter"].ring_bytes == depth * LAYER * 7 / 8


def small_arrays():
    """The compiled loss and gradient of four layers, each of 16 small matrices."""

    def layer(x, weights):
        for w in marks.use(weights):
            x = jnp.tanh(x @ w)
        return x, None

    def run(params, batch):
        x = jax.lax.scan(jax.checkpoint(layer), batch["x"], params)[0]
        return objective.Mean(jnp.sum(x**2), jnp.float32(len(x)))

    sharded = place([np.ones((4, 32, 32), np.float32)] * 16, rule=ALL_LAYERS)
    batch = {"x": np.ones((8, 32), np.float32)}
    return fsdp.value_and_grad(run, LINE, ALL_LAYERS).lower(sharded, batch).compile()


def test_what_travels_together_is_little_of_what_is_gathered(monkeypatch):
    """It is there twice, flat and in its shapes; the bytes sent are those of arrays alone."""
    found = []
    for share in 8, 10**6:
        monkeypatch.setattr(gathering, "SHARE", share)
        compiled = small_arrays()
        sent = measure.collectives(compiled)
        found.append((measure.bytes_per_device(compiled).temporaries, sent))
    (held, together), (least, alone) = found
    assert held - least <= 16 * 4 * 32 * 32 / 4
    assert together["all-gather"].dynamic < alone["all-gather"].dynamic
    assert together.ring_bytes == alone.ring_bytes


def save_all(function):
    """An outer checkpoint that keeps everything but a name that nothing bears."""
    policy = jax.checkpoint_policies.save_anything_except_these_names("nothing")
    return jax.checkpoint(function, policy=policy)


@pytest.mark.parametrize(
    "mistake",
    [
        dict(gather_within=False),
        dict(checkpoint=lambda layer: layer),
        dict(whole=save_all),
    ],
    ids=["gathered outside the remat", "no remat", "an outer policy"],
)
def test_gathered_weights_that_are_kept_are_seen(mistake):
    assert kept_per_layer(**mistake) >= LAYER


# Mistakes made on purpose must be seen, and errors must be named.


def break_sum(monkeypatch):
    """Forgets what is replicated, as one may who takes check_vma for True."""
    real = gradients._sum
    forget = lambda along, grad, s: grad if s.cut is None else real(along, grad, s)  # noqa: E731
    monkeypatch.setattr(gradients, "_sum", forget)


def break_check_vma(monkeypatch):
    """With check_vma=True the cotangent, summed over devices, does not fit: an error by JAX."""
    real = jax.shard_map
    careless = lambda f, **options: real(f, **(options | {"check_vma": True}))  # noqa: E731
    monkeypatch.setattr(jax, "shard_map", careless)


def break_axis(monkeypatch):
    """Sums the shards' gradients over the wrong axis: that of the shards, not of their copies."""
    wrong = lambda along, grad, s: jax.lax.psum(grad, along.rows[-1])  # noqa: E731
    monkeypatch.setattr(gradients, "_sum", wrong)


def break_scatter(monkeypatch):
    real = gathering._scattered
    monkeypatch.setattr(gathering, "_scattered", lambda g, how: [x / 8 for x in real(g, how)])


def break_count(monkeypatch):
    """Divides each part by its own count: a mean of means."""
    real = objective.gradients._Part.forward

    def own(self, *given):
        mean, extra, backward = real(self, *given)
        return mean, extra, lambda whole: backward(mean)

    monkeypatch.setattr(objective.gradients._Part, "forward", own)


def test_a_mistake_is_seen(monkeypatch):
    tree, batch = tree_of([(5, 8), ()]), rows(13)
    expected = jax.jit(objective.value_and_grad(loss))(tree, batch)
    given = dict(m=GRID, replicate=("data",), expected=expected)
    check(tree, batch, **given)
    for mistake in break_sum, break_check_vma, break_axis, break_scatter, break_count:
        with monkeypatch.context() as patch:
            mistake(patch)
            with pytest.raises(ValueError if mistake is break_check_vma else AssertionError):
                check(tree, batch, **given)


def test_errors_are_named():
    tree, batch = tree_of([(5, 8), (3,)]), rows(8)
    sharded = place(tree)
    cases = [
        (
            ValueError,
            "the mesh has no axis 'model'",
            lambda: fsdp.value_and_grad(loss, LINE, "model"),
        ),
        (
            ValueError,
            "stacked='blocks'; expected a pred",
            lambda: fsdp.rule(stacked="blocks"),
        ),
        (
            ValueError,
            "has no axis 'data'",
            lambda: fsdp.value_and_grad(loss, LINE, replicate=("data",)),
        ),
        (
            ValueError,
            "zero=4; expected 1, 2 or 3",
            lambda: fsdp.value_and_grad(loss, LINE, zero=4),
        ),
        (
            ValueError,
            r"first of shape \(5, 8\) is no array of JAX; expected .*layouts.shardings\(layout",
            lambda: fsdp.value_and_grad(loss, LINE)(tree, batch),
        ),
        (
            ValueError,
            r"rest/0 of shape \(3,\) lies as SingleDeviceSharding.*; expected",
            lambda: fsdp.value_and_grad(loss, LINE)(sharded | {"rest": (jnp.ones(3),)}, batch),
        ),
        (
            ValueError,
            r"first of shape \(5, 8\) lies as .*'fsdp': 8.* expected .*'fsdp': 4",
            lambda: fsdp.value_and_grad(loss, GRID, replicate=("data",))(sharded, batch),
        ),
        (
            ValueError,
            r"layouts.step: first of shape \(5, 8\) lies as .*P.*\(\).*; expected .*None, 'fsdp'",
            lambda: layouts.step(layouts.Layout(LINE, fsdp="fsdp"), loss, optax.sgd(1))(
                rules.place({"first": jnp.ones((5, 8))}, P(), LINE) | {"rest": sharded["rest"]},
                (),
                batch,
            ),
        ),
        (
            ValueError,
            r"mask of shape \(13,\) does not split into 8 parts.*fsdp.pad\(batch, 8\)",
            lambda: fsdp.value_and_grad(loss, LINE)(sharded, rows(13)),
        ),
        (
            ValueError,
            "the batch is None, and has no arrays whose rows could be cut into 8 parts",
            lambda: fsdp.value_and_grad(loss, LINE)(sharded, None),
        ),
        (
            TypeError,
            r"The loss returned \(5, 8\); expected objective.Mean",
            lambda: fsdp.value_and_grad(lambda p, b: p["first"], LINE)(sharded, batch),
        ),
        (
            ValueError,
            r"expected a dict with 'mask'.*got \['x'\]",
            lambda: fsdp.pad({"x": batch["x"]}, 8),
        ),
        (
            ValueError,
            r"expected a dict with 'weights'.*got \['mask', ",
            lambda: fsdp.pad(batch, 8, mask="weights"),
        ),
        (
            TypeError,
            "n is int32, which has no gradient",
            lambda: fsdp.value_and_grad(loss, LINE)(
                place({"n": np.arange(8, dtype=np.int32)}), batch
            ),
        ),
    ]
    for kind, message, act in cases:
        with pytest.raises(kind, match=message):
            act()


def test_a_layer_whose_owner_cannot_be_told_is_named():
    """Two bare arrays of one shape, cut along different axes."""
    params = {"a": np.ones((2, 8, 4), np.float32), "b": np.ones((2, 1, 32), np.float32)}
    arrays = array_layouts(params, ALL_LAYERS, LINE)
    assert len({s.local_shape(LINE) for s in arrays}) == 1

    def run(params, batch):
        total = sum(jnp.sum(marks.use(x[0])) for x in params.values())
        return objective.Mean(total * jnp.sum(batch["x"]), jnp.float32(1))

    with pytest.raises(
        ValueError, match=r"may be of (a or of b|b or of a); give it the dict or state"
    ):
        fsdp.value_and_grad(run, LINE, ALL_LAYERS)(place(params, rule=ALL_LAYERS), rows(8))


def test_the_mask_of_a_padded_batch_may_have_any_name():
    found = fsdp.pad({"x": np.ones((5, 2)), "weights": np.ones(5)}, 4, mask="weights")
    assert found["x"].shape == (8, 2) and found["weights"].tolist() == [1] * 5 + [0] * 3


def test_what_is_returned_tells_shapes_as_a_jitted_function_does():
    params = place(tree_of([(8, 4)]))
    run = fsdp.value_and_grad(loss, LINE)
    mean, grads = run.eval_shape(params, rows(8))
    assert (mean.shape, grads["first"].shape) == ((), (8, 4))
