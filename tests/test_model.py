import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import marked

from shardwise import layers, marks, model

SMALL = model.Config(vocab=17, embed=12, layers=2, heads=4, kv_heads=2, head_dim=6, mlp=20)


def decoder(config, kind=model.Decoder):
    return kind(config, rngs=nnx.Rngs(0))


@functools.cache
def built(config, kind=model.Decoder):
    """The decoder, which no test changes; in one program, not an operation at a time."""
    return nnx.jit(decoder, static_argnums=(0, 1))(config, kind)


@functools.partial(jax.jit, static_argnums=0)
def merged(graphdef, params, *args):
    return nnx.merge(graphdef, params)(*args)


def run(net, *args):
    return np.asarray(merged(*nnx.split(net), *args))


def tokens(config, shape=(2, 7)):
    return jax.random.randint(jax.random.key(1), shape, 0, config.vocab)


@functools.cache
def loss_and_grad(config):
    graphdef, params = nnx.split(built(config))
    weights = jax.random.normal(jax.random.key(2), (2, 7, config.vocab))

    def loss(params):
        return jnp.sum(weights * nnx.merge(graphdef, params)(tokens(config)))

    return jax.jit(jax.value_and_grad(loss))(params)


@given(st.data())
@settings(max_examples=6)
def test_shapes_for_random_configs(draw):
    n = functools.partial(lambda a, b: draw.draw(st.integers(a, b)))
    kv_heads, stages = n(1, 3), n(1, 2)
    config = model.Config(
        vocab=n(2, 30), embed=n(1, 20), layers=stages * n(1, 2), heads=kv_heads * n(1, 3),
        kv_heads=kv_heads, head_dim=2 * n(1, 4), mlp=n(1, 20), stages=stages,
    )  # fmt: skip
    logits = jax.eval_shape(lambda: decoder(config)(tokens(config, (3, 5))))
    assert logits.shape == (3, 5, config.vocab) and logits.dtype == jnp.float32


RUNS = {
    "unrolled": {"scan": False},
    "remat": {"remat": True},
    "stages": {"stages": 2},
    "all": {"stages": 2, "scan": False, "remat": True},
}


@pytest.mark.parametrize("name", marked(RUNS, ["all"]))
def test_how_it_runs_does_not_change_what_it_computes(name):
    ours = loss_and_grad(dataclasses.replace(SMALL, **RUNS[name]))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(loss_and_grad(SMALL)), strict=True):
        # The same sums in another order: a few float32 roundings of the largest entries.
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())


def test_dropout_needs_a_key():
    config = dataclasses.replace(SMALL, dropout=0.5)
    net = built(config)
    off = run(net, tokens(config))
    np.testing.assert_array_equal(off, run(built(SMALL), tokens(SMALL)))
    on = run(net, tokens(config), jax.random.key(0))
    assert np.abs(on - off).max() > 0.1


@pytest.mark.slow
def test_dropout_is_the_same_in_a_scan_and_unrolled():
    configs = [dataclasses.replace(SMALL, dropout=0.5, scan=scan) for scan in (True, False)]
    on, loop = (run(built(c), tokens(c), jax.random.key(0)) for c in configs)
    np.testing.assert_allclose(on, loop, rtol=1e-5, atol=1e-5)


def test_dropout_keeps_the_mean():
    x = jnp.ones((100, 100))
    dropped = layers.drop(x, 0.25, jax.random.key(0))
    assert set(np.unique(dropped).round(4)) == {0.0, np.float32(4 / 3).round(4)}
    # 10,000 draws: the mean's standard deviation is 0.006.
    assert abs(dropped.mean() - 1) < 0.03


def test_attention_is_causal():
    seq = np.array(tokens(SMALL, (1, 9)))
    changed = seq.copy()
    changed[0, 5] = (seq[0, 5] + 1) % SMALL.vocab
    before, after = run(built(SMALL), seq), run(built(SMALL), changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.abs(before[:, 5:] - after[:, 5:]).max(axis=(0, 2)).min() > 0


def test_packed_documents_do_not_see_each_other():
    net, seq = built(SMALL), np.asarray(tokens(SMALL, (1, 9)))
    alone = np.concatenate([run(net, seq[:, :4]), run(net, seq[:, 4:])], axis=1)
    batch = {
        "positions": jnp.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]]),
        "documents": jnp.array([[0] * 4 + [1] * 5]),
    }
    packed = run(net, seq, None, marks.places(batch, 1, 9))
    np.testing.assert_allclose(packed, alone, rtol=1e-5, atol=1e-5)
    positions_alone = {"positions": batch["positions"]}  # apart in angle, still seen
    seen = run(net, seq, None, marks.places(positions_alone, 1, 9))
    assert np.abs(seen - alone).max() > 0.01


def test_rotary_scores_depend_on_distance_only():
    q, k = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    rotary = jax.jit(lambda x: layers.rotary(x, jnp.arange(10)[None]))
    turned = [np.asarray(rotary(np.broadcast_to(x, (1, 10, 1, 8)))) for x in (q, k)]
    scores = np.einsum("bshd,bthd->st", *turned)
    for distance in range(10):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scores[0, 0], q @ k, rtol=1e-5)


def test_every_parameter_names_its_logical_axes():
    _, params = nnx.split(built(SMALL))
    sizes = {"layers": SMALL.layers, "vocab": SMALL.vocab} | {
        name: getattr(SMALL, name) for name in ("embed", "heads", "kv_heads", "head_dim", "mlp")
    }
    leaves = nnx.to_flat_state(params)
    for path, leaf in leaves:
        names = leaf.get_metadata()["logical_axes"]
        names = ("layers", *names) if path[0] == "blocks" else names
        assert leaf.shape == tuple(sizes[name] for name in names), path
    assert ("blocks", "q", "kernel") in {path for path, _ in leaves}


def test_compute_dtype_is_separate_from_parameter_dtype():
    config = dataclasses.replace(SMALL, dtype=jnp.bfloat16)
    net = built(config)
    assert {a.dtype.name for a in jax.tree.leaves(nnx.split(net)[1])} == {"float32"}
    seen = []
    with marks.bind(constrain=lambda x, name: seen.append((name, x.dtype.name)) or x):
        logits = run(net, tokens(config))
    assert set(seen) == {
        ("embedding_output", "bfloat16"),
        ("attention_input", "bfloat16"),
        ("attended", "bfloat16"),
        ("attention_output", "bfloat16"),
        ("mlp_input", "bfloat16"),
        ("mlp_hidden", "bfloat16"),
        ("mlp_output", "bfloat16"),
        ("logits", "float32"),
    }
    axes = {axis for _, v in nnx.to_flat_state(nnx.state(net)) for axis in v.logical_axes}
    assert axes.isdisjoint(name for name, _ in seen)  # one name never means both
    exact = run(built(SMALL), tokens(SMALL))
    # bfloat16 keeps 8 bits: a relative error of about 2^-8 for each of a few roundings.
    assert np.abs(logits - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_marks_stand_where_the_layers_and_stages_meet(scan):
    config = dataclasses.replace(SMALL, stages=2, scan=scan)
    count = dict.fromkeys(["use", "stage_boundary"], 0)

    def counted(name):
        def meaning(x):
            count[name] += 1
            return x

        return meaning

    with marks.bind(**{name: counted(name) for name in count}):
        jax.eval_shape(lambda: decoder(config)(tokens(config)))
    assert count["stage_boundary"] == config.stages - 1
    # A scan's body is traced once, however many layers and stages run it.
    assert count["use"] >= (1 if scan else config.layers)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 3, "kv_heads": 2}, "heads=3 must be a multiple of kv_heads=2"),
        ({"layers": 3, "stages": 4}, "stages=4 must be at most layers=3"),
        ({"kv_heads": 0}, "kv_heads=0 must be at least 1"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
    ],
)
def test_a_config_that_cannot_be_built_says_why(wrong, message):
    with pytest.raises(ValueError, match=message):
        model.Config(**wrong)


@jax.jit
def entropy_and_gradient(logits, targets, slope):
    each, back = jax.vjp(lambda x: model.cross_entropy(x, targets), logits)
    return each, back(slope)[0]


@given(st.data())
@settings(max_examples=20)
def test_cross_entropy_is_that_of_the_definition(draw):
    """In float64 by NumPy, the loss and its gradient, by which each logit is weighed."""
    shape = draw.draw(st.sampled_from([(1, 1, 1), (2, 3, 2), (4, 1, 37)]), "shape")
    dtype = draw.draw(st.sampled_from([jnp.float32, jnp.bfloat16]), "dtype")
    rng = np.random.default_rng(draw.draw(st.integers(0, 2**32), "seed"))
    size = draw.draw(st.sampled_from([0.1, 5.0, 300.0]), "size")
    logits = jnp.asarray(rng.normal(size=shape) * size, dtype)
    targets = rng.integers(0, shape[2], shape[:2])
    slope = rng.normal(size=shape[:2]).astype(np.float32)
    each, gradient = entropy_and_gradient(logits, targets, slope)
    given_logits = np.asarray(logits, np.float64)
    wide = np.exp(given_logits - given_logits.max(-1, keepdims=True))
    p = wide / wide.sum(-1, keepdims=True)
    hot = np.eye(shape[2])[targets]
    top = given_logits.max(-1) + np.log(wide.sum(-1))
    expected = top - (given_logits * hot).sum(-1)
    assert each.dtype == jnp.float32
    np.testing.assert_allclose(each, expected, rtol=1e-6, atol=1e-6 * size)
    assert gradient.dtype == dtype
    near = dict(rtol=1e-5, atol=1e-5) if dtype == jnp.float32 else dict(rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(np.float64(gradient), slope[..., None] * (p - hot), **near)


@pytest.mark.parametrize("chunks", [1, 7])
def test_a_target_outside_the_vocabulary_counts_only_where_it_is_masked(chunks):
    graphdef, params = nnx.split(built(SMALL))
    config = dataclasses.replace(SMALL, loss_chunks=chunks)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))

    def total(params, batch):
        found = model.loss(params, batch, graphdef=graphdef)
        return found.total, found

    run, ids = jax.jit(jax.value_and_grad(total, has_aux=True)), tokens(SMALL)
    batch = {"tokens": ids, "targets": ids, "mask": jnp.ones(ids.shape)}
    for wrong in (-100, SMALL.vocab):
        odd = batch | {"targets": ids.at[1, 2].set(wrong)}
        assert np.isnan(run(params, odd)[0][0])
        masks = batch["mask"].at[1, 2].set(0)
        found = [run(params, b | {"mask": masks}) for b in (odd, batch)]
        (((total, masked), grads), ((_, expected), _)) = found
        assert masked == expected and np.isfinite(total)
        assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


class Capped(model.Decoder):
    def __call__(self, tokens, key=None, places=None):
        return 3 * jnp.tanh(super().__call__(tokens, key, places) / 3)


def test_the_loss_is_that_of_the_model_that_is_called():
    decoder = nnx.jit(lambda: Capped(SMALL, nnx.Rngs(0)))()
    tokens = jnp.arange(16).reshape(2, 8)
    batch = dict(tokens=tokens, targets=tokens + 1, mask=jnp.ones(tokens.shape))
    decoder.head.kernel[...] *= 100  # so that a cap shows

    @nnx.jit
    def found(decoder):
        logits = decoder(tokens), decoder.route(tokens)[0]
        nats = [jnp.sum(model.cross_entropy(x, tokens + 1)) for x in logits]
        return model.loss(decoder, batch).total, *nats

    ours, expected, without = found(decoder)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    assert abs(without / expected - 1) > 0.1


class Biased(model.Decoder):
    """Whose head has a bias, and whose logits are capped."""

    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        self.head = layers.Linear(config, ("embed", "vocab"), ("embed",), rngs, bias=True)
        self.head.bias[...] += jnp.linspace(-1, 1, config.vocab)

    def logits(self, x, head):
        return 3 * jnp.tanh(super().logits(x, head) / 3)


def test_chunks_take_a_head_and_logits_of_ones_own_also_in_second_derivatives():
    ids = tokens(SMALL)
    batch = {"tokens": ids, "targets": ids[:, ::-1], "mask": ids % 3 != 0}
    params = nnx.jit(lambda: nnx.state(Biased(SMALL, nnx.Rngs(0))))()
    direction = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size)).reshape(a.shape), params)

    def found(chunks):
        config = dataclasses.replace(SMALL, loss_chunks=chunks)
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: Biased(config, nnx.Rngs(0))))
        grad = jax.grad(lambda p: model.loss(p, batch, graphdef=graphdef).total)
        return jax.jit(lambda p: jax.jvp(grad, (p,), (direction,)))(params)

    whole, cut = found(1), found(7)
    assert np.abs(whole[0]["head"]["bias"][...]).max() > 0.1
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5 * (1 + np.abs(a).max()))


def test_chunks_sum_a_float64_head_s_gradient_in_float64():
    def found(chunks):
        dtypes = dict(dtype=jnp.float64, param_dtype=jnp.float64)
        config = dataclasses.replace(SMALL, loss_chunks=chunks, **dtypes)
        graphdef, params = nnx.split(built(config))
        total = jax.jit(jax.grad(lambda p: model.loss(p, batch, graphdef=graphdef).total))
        return total(params)["head"]["kernel"][...]

    jax.config.update("jax_enable_x64", True)
    try:
        ids = tokens(SMALL)
        batch = {"tokens": ids, "targets": ids[:, ::-1], "mask": ids % 3 != 0}
        whole, cut = found(1), found(7)
        assert cut.dtype == jnp.float64
        np.testing.assert_allclose(cut, whole, rtol=0, atol=1e-12)
    finally:
        jax.config.update("jax_enable_x64", False)


class Quantised(model.Decoder):
    """Whose head is of integers, which nobody trains."""

    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        self.head.kernel = nnx.Variable(jnp.round(100 * self.head.kernel[...]).astype(jnp.int8))

    def logits(self, x, head):
        return super().logits(x, head) / 100


def test_chunks_take_a_quantised_head_and_no_rows():
    ids = tokens(SMALL)
    batch = {"tokens": ids, "targets": ids[:, ::-1], "mask": ids % 3 != 0}

    def found(chunks):
        config = dataclasses.replace(SMALL, loss_chunks=chunks)
        graphdef, params, head = nnx.split(built(config, Quantised), nnx.Param, ...)
        total = lambda p, b: model.loss(nnx.merge(graphdef, p, head), b).total  # noqa: E731
        assert jax.eval_shape(total, params, jax.tree.map(lambda x: x[:0], batch)).shape == ()
        return jax.jit(jax.value_and_grad(total))(params, batch)

    for a, b in zip(jax.tree.leaves(found(7)), jax.tree.leaves(found(1)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind, chunks, told",
    [(model.Decoder, 3, "3 does not divide the 8 tokens"), (Capped, 4, "Capped has a __call__ or")],
)
def test_chunks_of_the_loss_that_cannot_be_are_refused(kind, chunks, told):
    config = dataclasses.replace(SMALL, loss_chunks=chunks)
    decoder = nnx.eval_shape(lambda: kind(config, nnx.Rngs(0)))
    ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    with pytest.raises(ValueError, match=told):
        nnx.eval_shape(model.loss, decoder, dict(tokens=ids, targets=ids, mask=ids))
