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

from shardwise import data, fsdp, marks, measure, mesh, model, objective
from shardwise.fsdp import gathering, gradients, optimizing

mesh.simulate(8)
LINE, GRID = mesh.make(fsdp=8), mesh.make(data=2, fsdp=4)


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


def check(tree, batch, m=LINE, min_size=0, rtol=1e-5, expected=None, **options):
    """Equal to one device."""
    parts = m.size * options.get("microbatches", 1)
    expected = expected or jax.jit(objective.value_and_grad(loss))(tree, batch)

    @jax.jit
    def run(tree, batch):
        sharded = fsdp.place(tree, m, min_size=min_size)
        mean, grads = fsdp.value_and_grad(loss, m, **options)(sharded, batch)
        return mean, fsdp.unpad(grads)

    assert_close(run(tree, fsdp.pad(batch, parts)), expected, rtol)


SHAPES = st.lists(st.lists(st.integers(0, 13), max_size=3).map(tuple), min_size=1, max_size=4)


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
@settings(max_examples=12)
def test_any_tree_and_any_batch_equal_one_device(
    shapes, count, zero, microbatches, where, min_size, dtypes
):
    rtol = 1e-5 if len(dtypes) == 1 else 1e-2  # a gradient has its parameter's dtype
    how = dict(min_size=min_size, zero=zero, microbatches=microbatches, rtol=rtol)
    check(tree_of(shapes, dtypes=dtypes), rows(count), **where, **how)


@given(shapes=SHAPES, n=st.sampled_from([1, 2, 8]))
@settings(max_examples=30)
def test_every_device_holds_its_share_and_the_stated_padding(shapes, n):
    tree = tree_of(shapes)
    sharded = fsdp.place(tree, mesh.make(fsdp=n))
    held = set(measure.bytes_on_devices(sharded).values())
    bound = 0
    for x, s in zip(jax.tree.leaves(tree), sharded.layout, strict=True):
        share = x.nbytes / n + (0 if s.cut is None else x.nbytes / s.shape[s.cut] * (n - 1) / n)
        bound += x.nbytes if s.cut is None else share
        if s.cut is None:
            assert max(x.shape, default=1) <= 1 or x.size == 0
    assert len(held) <= 1 and max(held, default=0) <= bound + 1e-6
    for a, b in zip(jax.tree.leaves(fsdp.whole(sharded)), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(a, b)
    assert f"of {n} devices" in fsdp.describe(sharded)
    assert ("size 1" in fsdp.describe(sharded)) == (n == 1)


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
    sharded = fsdp.place(params, LINE, stacked="layers")
    compiled = jax.jit(fsdp.value_and_grad(function, LINE)).lower(sharded, batch).compile()
    mean, grads = compiled(sharded, batch)
    assert_close((mean, fsdp.whole(grads)), expected)
    counted = measure.collectives(compiled)
    if not scan:
        return  # unrolled, XLA may share or undo gathers
    stored = {
        s.path: x.nbytes
        for x, s in zip(jax.tree.leaves(sharded.tree), sharded.layout, strict=True)
        if s.cut is not None
    }
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
        "layers": {"kernel": draw.normal(size=(4, 6, 6)), "bias": draw.normal(size=(4, 6))},
        "out": draw.normal(size=(6, 5)),
    }
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    batch = {"x": draw.normal(size=(16, 6)).astype(np.float32)}

    def alone(params, batch):
        return network(params, batch, key=jax.random.key(0))[0]

    expected = jax.jit(objective.value_and_grad(alone))(params, batch)
    sharded = fsdp.place(params, LINE, stacked=lambda path: path.startswith("layers/"))
    run = jax.jit(fsdp.value_and_grad(network, LINE, has_aux=True))
    (mean, aux), grads = run(sharded, batch, key=jax.random.key(0))
    assert_close((mean, fsdp.whole(grads)), expected)
    assert aux["rows"] == 16
    mixed = fsdp.value_and_grad(
        network, LINE, has_aux=True, dtype="bfloat16", reduce_dtype="float32"
    )
    (mean, _), grads = jax.jit(mixed)(sharded, batch, key=jax.random.key(0))
    assert_close((mean, fsdp.whole(grads)), expected, rtol=0.1)
    assert {str(g.dtype) for g in jax.tree.leaves(grads)} == {"float32"}
    lowered = jax.jit(mixed).lower(sharded, batch, key=jax.random.key(0)).as_text()
    assert "bf16" in lowered and "reduce_scatter" in lowered
    devices = [jax.random.fold_in(jax.random.key(0), i) for i in range(8)]
    np.testing.assert_allclose(
        aux["noise"], sum(jax.random.normal(k, (2,)).sum() for k in devices), rtol=1e-5
    )


def test_a_scalar_loss_is_a_mean_over_rows():
    tree, batch = tree_of([(5, 7), (3,)]), rows(16)

    def mean(params, batch):
        return loss(params, batch).total / len(batch["x"])

    value, grads = jax.jit(fsdp.value_and_grad(mean, LINE))(fsdp.place(tree, LINE), batch)
    assert_close((value, fsdp.whole(grads)), jax.jit(jax.value_and_grad(mean))(tree, batch))


def test_a_shared_variable_is_one_array():
    class Tied(nnx.Module):
        def __init__(self):
            draw = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
            self.embed = self.head = nnx.Param(jnp.asarray(draw))

    graphdef, params = nnx.split(Tied())

    def run(params, batch):
        tied = nnx.merge(graphdef, params)
        x = jnp.tanh(batch["x"][:, None, None] * tied.embed[...][None])
        return objective.Mean(jnp.sum((x @ tied.head[...].T) ** 2), jnp.float32(len(batch["x"])))

    sharded = fsdp.place(params, LINE)
    assert len(jax.tree.leaves(sharded.tree)) == 1
    mean, grads = jax.jit(fsdp.value_and_grad(run, LINE))(sharded, rows(8))
    assert_close((mean, fsdp.whole(grads)), jax.jit(objective.value_and_grad(run))(params, rows(8)))


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
    """Parameters after several steps equal one device's; the optimizer's states as stored."""

    @jax.jit
    def step(params, state):
        grads = fsdp.value_and_grad(loss, m, **options)(params, fsdp.pad(batch, m.size))[1]
        updates, state = fsdp.update(tx, grads, state, params)
        return optax.apply_updates(params, updates), state

    sharded = fsdp.place(tree, m)
    kept = fsdp.init(tx, sharded)
    for _ in range(steps):
        sharded, kept = step(sharded, kept)
    assert_close(fsdp.whole(sharded), expected, rtol=1e-4)
    return kept, fsdp.init(tx, sharded)


UNEVEN = tree_of([(131, 137), (7,), (3, 5, 2), ()])


@functools.cache
def of_uneven(name):
    return on_one(OPTIMIZERS[name], UNEVEN, rows(13))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_equals_one_device(name):
    for state in check_steps(OPTIMIZERS[name], UNEVEN, rows(13), of_uneven(name)):
        for x, s in zip(jax.tree.leaves(state.tree), state.layout, strict=True):
            # Each array with axes is cut, and lies that way.
            assert (s.cut is not None) == (np.prod(s.shape) > 1), s.path
            assert x.addressable_shards[0].data.shape == s.local_shape(8), s.path


@given(
    name=st.sampled_from(["clipped adam", "lamb", "adafactor", "muon"]),
    shapes=st.lists(st.lists(st.integers(1, 13), max_size=2).map(tuple), min_size=1, max_size=3),
    count=st.integers(1, 20),
    where=st.sampled_from([dict(), dict(m=GRID, replicate=("data",)), dict(m=mesh.make(fsdp=3))]),
    zero=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=6)
def test_random_trees_train_as_on_one_device(name, shapes, count, where, zero):
    """Factored from 4 on, so that Adafactor's small matrices have factored moments too."""
    small = dict(adafactor=optax.adafactor(1e-2, min_dim_size_to_factor=4))
    tx, tree = (OPTIMIZERS | small)[name], tree_of([(3,), *shapes])
    expected = on_one(tx, tree, rows(count), 2)
    check_steps(tx, tree, rows(count), expected, steps=2, zero=zero, **where)


def test_arrays_may_be_born_in_shards():
    def create(key):
        return fsdp.place({"w": jax.random.uniform(key, (131, 5))}, LINE)

    born = jax.jit(create)(jax.random.key(0))
    assert born.tree["w"].addressable_shards[0].data.shape == (17, 5)
    whole = jax.jit(jax.random.uniform, static_argnums=1)(jax.random.key(0), (131, 5))
    np.testing.assert_array_equal(fsdp.whole(born)["w"], whole)


def test_a_padded_array_stays_padded_by_zeros():
    tree, tx = tree_of([(131, 5), (7,)]), optax.adamw(1e-2)
    params = fsdp.place(tree, LINE)
    grads = fsdp.value_and_grad(loss, LINE)(params, fsdp.pad(rows(9), 8))[1]
    updates, _ = jax.jit(functools.partial(fsdp.update, tx))(grads, fsdp.init(tx, params), params)
    for sharded in params, grads, updates:
        for x, s in zip(jax.tree.leaves(sharded.tree), sharded.layout, strict=True):
            np.testing.assert_array_equal(np.take(x, range(s.shape[s.cut], s.padded), s.cut), 0)


# Mixed precision and growth.


def test_bytes_follow_the_dtypes_asked_for():
    tree = tree_of([(64, 64), (16,)])
    sharded, batch = fsdp.place(tree, LINE), rows(8)
    psi = sum(x.nbytes for x in jax.tree.leaves(tree))
    for dtype, reduce_dtype, gathers, reduces in [
        (None, None, 1, 1),
        ("bfloat16", None, 0.5, 0.5),
        ("bfloat16", "float32", 0.5, 1),
    ]:
        run = jax.jit(fsdp.value_and_grad(loss, LINE, dtype=dtype, reduce_dtype=reduce_dtype))
        counted = measure.collectives(run.lower(sharded, batch))
        assert counted["all-gather"].ring_bytes == gathers * psi * 7 / 8
        assert counted["reduce-scatter"].ring_bytes == reduces * psi * 7 / 8
        mean, grads = run(sharded, batch)
        assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))
        assert_close(
            (mean, fsdp.whole(grads)),
            jax.jit(objective.value_and_grad(loss))(tree, batch),
            rtol=1e-5 if dtype is None else 0.1,
        )


def test_zeros_numbers_and_accumulation_send_what_zero_says():
    tree = tree_of([(64, 64), (16,)])
    sharded, batch = fsdp.place(tree, LINE), rows(32)
    psi = sum(x.nbytes for x in jax.tree.leaves(tree)) * 7 / 8
    for zero, gathers, reduces in [(1, 1, 1), (2, 1, 4), (3, 4, 4)]:
        run = jax.jit(fsdp.value_and_grad(loss, LINE, zero=zero, microbatches=4))
        # As asked for: XLA may move a gather that is the same for all microbatches out of the loop.
        counted = measure.collectives(run.lower(sharded, batch))
        assert counted["all-gather"].ring_bytes == gathers * psi
        assert counted["reduce-scatter"].ring_bytes == reduces * psi


def test_copies_of_the_shards_cost_an_all_reduce_of_a_share():
    """Hybrid sharding: gathers and scatters among 4, then a share summed between the 2 copies."""
    tree = tree_of([(64, 64), (16,)])
    run = jax.jit(fsdp.value_and_grad(loss, GRID, replicate=("data",)))
    counted = measure.collectives(run.lower(fsdp.place(tree, GRID), rows(8)).compile())
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
    sharded = fsdp.place(params, LINE, stacked=lambda path: True)
    batch = {"x": np.ones((8, WIDE), np.float32)}
    function = fsdp.value_and_grad(whole(run), LINE)
    return jax.jit(function).lower(sharded, batch).compile()


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

    sharded = fsdp.place([np.ones((4, 32, 32), np.float32)] * 16, LINE, stacked=lambda path: True)
    batch = {"x": np.ones((8, 32), np.float32)}
    return jax.jit(fsdp.value_and_grad(run, LINE)).lower(sharded, batch).compile()


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
    real = gradients._Device._sum
    forget = lambda self, grad, s, axis: grad if s.cut is None else real(self, grad, s, axis)  # noqa: E731
    monkeypatch.setattr(gradients._Device, "_sum", forget)


def break_check_vma(monkeypatch):
    """With check_vma=True the cotangent, summed over devices, does not fit: an error by JAX."""
    real = jax.shard_map
    careless = lambda f, **options: real(f, **(options | {"check_vma": True}))  # noqa: E731
    monkeypatch.setattr(jax, "shard_map", careless)


def break_axis(monkeypatch):
    """Sums the shards' gradients over the wrong axis: that of the shards, not of their copies."""
    wrong = lambda self, grad, s, axis: jax.lax.psum(grad, self.divided.rows[-1])  # noqa: E731
    monkeypatch.setattr(gradients._Device, "_sum", wrong)


def break_scatter(monkeypatch):
    real = gathering._scattered
    monkeypatch.setattr(gathering, "_scattered", lambda g, how: [x / 8 for x in real(g, how)])


def break_count(monkeypatch):
    """Divides each part by its own count: a mean of means."""
    real = objective.gradients._Part.backward
    own = lambda self, run, whole: real(self, run, run.mean)  # noqa: E731
    monkeypatch.setattr(objective.gradients._Part, "backward", own)


def test_a_mistake_is_seen(monkeypatch):
    tree, batch = tree_of([(5, 7), ()]), rows(13)
    expected = jax.jit(objective.value_and_grad(loss))(tree, batch)
    given = dict(m=GRID, replicate=("data",), expected=expected)
    check(tree, batch, **given)
    for mistake in break_sum, break_check_vma, break_axis, break_scatter, break_count:
        with monkeypatch.context() as patch:
            mistake(patch)
            with pytest.raises(ValueError if mistake is break_check_vma else AssertionError):
                check(tree, batch, **given)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_an_optimizer_that_sees_padding_is_seen(name, monkeypatch):
    """Parameters and gradients go in as they are stored; only the state in its true shapes."""

    def careless(sharded):
        return sharded.tree if isinstance(sharded.tree, dict) else fsdp.unpad(sharded)

    monkeypatch.setattr(optimizing, "unpad", careless)
    with pytest.raises(AssertionError):
        check_steps(OPTIMIZERS[name], UNEVEN, rows(13), of_uneven(name))


def test_errors_are_named():
    tree, batch = tree_of([(5, 7), (3,)]), rows(8)
    sharded = fsdp.place(tree, LINE)
    cases = [
        (ValueError, "the mesh has no axis 'model'", lambda: fsdp.place(tree, LINE, "model")),
        (
            ValueError,
            "stacked='blocks'; expected a pred",
            lambda: fsdp.place(tree, LINE, stacked="blocks"),
        ),
        (
            ValueError,
            "has no axis 'data'",
            lambda: fsdp.value_and_grad(loss, LINE, replicate=("data",)),
        ),
        (
            ValueError,
            "zero=4, microbatches=1; expected",
            lambda: fsdp.value_and_grad(loss, LINE, zero=4),
        ),
        (
            TypeError,
            "the parameters are a dict; expected what fsdp.place",
            lambda: fsdp.value_and_grad(loss, LINE)(tree, batch),
        ),
        (
            ValueError,
            "sharded along 'fsdp' of",
            lambda: fsdp.value_and_grad(loss, GRID)(sharded, batch),
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
            r"The loss returned \(5, 7\); expected objective.Mean",
            lambda: fsdp.value_and_grad(lambda p, b: p["first"], LINE)(sharded, batch),
        ),
        (
            ValueError,
            r"expected a dict with 'mask'.*got \['x'\]",
            lambda: fsdp.pad({"x": batch["x"]}, 8),
        ),
        (
            TypeError,
            "n is int32, which has no gradient",
            lambda: fsdp.value_and_grad(loss, LINE)(
                fsdp.place({"n": np.arange(8, dtype=np.int32)}, LINE), batch
            ),
        ),
    ]
    for kind, message, act in cases:
        with pytest.raises(kind, match=message):
            act()


def test_a_layer_whose_owner_cannot_be_told_is_named():
    """Two bare arrays of one shape, cut along different axes."""
    params = {"a": np.ones((2, 8, 4), np.float32), "b": np.ones((2, 1, 32), np.float32)}
    sharded = fsdp.place(params, LINE, stacked=lambda path: True)
    assert len({s.local_shape(8) for s in sharded.layout}) == 1

    def run(params, batch):
        total = sum(jnp.sum(marks.use(x[0])) for x in params.values())
        return objective.Mean(total * jnp.sum(batch["x"]), jnp.float32(1))

    with pytest.raises(
        ValueError, match=r"may be of (a or of b|b or of a); give it the dict or state"
    ):
        fsdp.value_and_grad(run, LINE)(sharded, rows(8))
