"""Marks under FSDP: where a loss may read what it is given in shares, and what is gathered how."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardwise import fsdp, marks, measure, mesh, objective, rules

mesh.simulate(8)
LINE = mesh.make(fsdp=8)


def assert_close(ours, theirs, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(initial=0), 1e-6))


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 0.3


def mean_of(x):
    return objective.Mean(jnp.sum(x**2), jnp.float32(len(x)))


def rows_of(batch):
    """Their number, as a sum over them."""
    return jnp.sum(jnp.abs(batch["x"][:, 0]) >= 0).astype(jnp.float32)


def everything(path):
    return True


BATCH = {"x": draw(32, 16, seed=9)}


def one_device(loss, params):
    return jax.jit(objective.value_and_grad(loss))(params, BATCH)


def check(loss, params, stacked=everything, m=LINE, expected=None, **options):
    """Equal to one device; returns what is sent, as asked for."""
    rule = fsdp.rule(stacked=stacked)
    sharded = rules.place(params, rule, m)
    lowered = fsdp.value_and_grad(loss, m, rule, **options).lower(sharded, BATCH)
    rtol = 0.05 if options.get("dtype") else 1e-5
    assert_close(lowered.compile()(sharded, BATCH), expected or one_device(loss, params), rtol)
    return measure.collectives(lowered)


def refused(loss, params, message, stacked=everything):
    rule = fsdp.rule(stacked=stacked)
    with pytest.raises(ValueError, match=message):
        fsdp.value_and_grad(loss, LINE, rule)(rules.place(params, rule, LINE), {"x": draw(8, 16)})


STACK = {"w": draw(3, 16, 16), "b": draw(3, 16, seed=1)}


def body(x, w):
    """At the module's top level: JAX keeps its trace."""
    w = marks.use(w)
    return jnp.tanh(x @ w["w"] + w["b"][None]), None


@jax.jit
def block(x, w):
    return body(x, w)[0]


def scanned(params, batch):
    return mean_of(jax.lax.scan(body, batch["x"], params)[0])


def unrolled(params, batch):
    x = batch["x"]
    for i in range(3):
        x = block(x, jax.tree.map(lambda a, i=i: a[i], params))
    return mean_of(x)


@pytest.mark.parametrize("loss", [scanned, pytest.param(unrolled, marks=pytest.mark.slow)])
def test_a_body_at_a_modules_top_level_means_what_it_means_now(loss):
    expected = one_device(loss, STACK)
    for options in {}, {}, {"microbatches": 2}, {"dtype": "bfloat16"}, {}, {"zero": 1}:
        check(loss, STACK, expected=expected, **options)


def penalised(params, batch):
    total, count = scanned(params, batch)[0], rows_of(batch)
    return objective.Mean(total + count * jnp.sum(params["w"] ** 2), count)


def forgetful(params, batch):
    """The first layer reads a bias that broadcasts: its share has one entry of eight."""
    x = batch["x"] * params["b"][0, :8].sum()
    return mean_of(jax.lax.scan(body, x, params)[0])


def half_used(params, batch):
    def layer(x, w):
        return x * jnp.sum(w["b"]) + body(x, w)[0], None

    return mean_of(jax.lax.scan(layer, batch["x"], params)[0])


def looped(params, batch):
    def step(i, x):
        return x + jnp.sum(params["w"][i]) + body(x, jax.tree.map(lambda a: a[i], params))[0]

    return mean_of(jax.lax.fori_loop(0, 3, step, batch["x"]))


def branched(params, batch):
    x = jax.lax.cond(batch["x"][0, 0] > 0, lambda w: jnp.sum(w), lambda w: 0.0, params["b"])
    return mean_of(jax.lax.scan(body, batch["x"] + x, params)[0])


def returned(params, batch):
    return objective.Mean(params["b"][0, 0] * rows_of(batch), rows_of(batch))


@pytest.mark.parametrize(
    ("loss", "path", "operation"),
    [
        (penalised, "w", "integer_pow|square"),
        (forgetful, "b", "slice"),
        pytest.param(half_used, "b", "reduce_sum", marks=pytest.mark.slow),
        pytest.param(looped, "w", "reduce_sum", marks=pytest.mark.slow),
        (branched, "b", "reduce_sum"),
        (returned, "b", "slice"),
    ],
)
def test_a_stacked_array_read_outside_use_is_named(loss, path, operation):
    refused(
        loss,
        STACK,
        rf"fsdp: {path} is stacked, and read outside marks.use, by ({operation}): there a device "
        r"has only its share of it. Call `weights = marks.use\(weights\)`",
    )
    if loss is not branched:
        check(loss, STACK, stacked=None)  # without stacked= every read is right


def test_a_penalty_on_the_whole_stack_is_right_with_use():
    def loss(params, batch):
        total, count = scanned(params, batch)[0], rows_of(batch)
        return objective.Mean(total + count * jnp.sum(marks.use(params)["w"] ** 2), count)

    check(loss, STACK)


def test_use_twice_is_right():
    def loss(params, batch):
        again = lambda x, w: body(x, marks.use(w))  # noqa: E731
        return mean_of(jax.lax.scan(again, batch["x"], params)[0])

    expected = one_device(loss, STACK)
    check(loss, STACK, expected=expected)
    check(loss, STACK, m=mesh.make(fsdp=1), expected=expected)


def test_stacks_with_equal_inner_names():
    """Of one shape, of shapes whose shares are equal, and where one's share is the other whole."""

    def loss(params, batch):
        x = jax.lax.scan(body, batch["x"], params["encoder"])[0]
        return mean_of(jax.lax.scan(body, x, params["decoder"])[0])

    both = {"encoder": STACK, "decoder": jax.tree.map(lambda x: x[:2] + 0.1, STACK)}
    check(loss, both)

    def apart(params, batch):
        total = 0 * jnp.sum(batch["x"])
        for name in "ab":

            def part(x, w, name=name):
                return x + rows_of(batch) * jnp.sum(pick(w, name)["w"] ** 2), None

            total = jax.lax.scan(part, total, params[name])[0]
        return objective.Mean(total, rows_of(batch))

    # Shares of [1, 4] both, one of an [8, 4], one of a [1, 32].
    params = {"a": {"w": draw(2, 8, 4)}, "b": {"w": draw(2, 1, 32)}}
    pick = lambda w, name: marks.use(w)  # noqa: E731
    refused(apart, params, r"receives w of shape \(1, 4\), which may be of b/w or of a/w|of a/w or")
    pick = lambda w, name: marks.use({name: w})[name]  # noqa: E731
    check(apart, params)
    # A share of [2, 4] where the other layer's array is whole, and given to use as well.
    params = {"a": {"w": draw(2, 16, 4)}, "b": {"w": draw(2, 2, 4)}}
    pick = lambda w, name: marks.use(w)  # noqa: E731
    refused(
        apart,
        params,
        "may be of a/w or of what is whole|of what is whole or of a/w",
        stacked=lambda path: path.startswith("a"),
    )


def test_weights_may_be_renamed_and_regrouped_on_the_way_to_use():
    def loss(params, batch):
        def layer(x, w):
            kernel, bias = marks.use([w["w"], w["b"]])
            return jnp.tanh(x @ kernel + bias[None]), None

        return mean_of(jax.lax.scan(layer, batch["x"], params)[0])

    def reshaped(params, batch):
        two = jax.tree.map(lambda a: a[:2].reshape(1, 2, *a.shape[1:]), params)
        outer = lambda x, w: jax.lax.scan(body, x, w)  # noqa: E731
        return mean_of(jax.lax.scan(outer, batch["x"], two)[0])

    def gathered_in_pairs(params, batch):
        w = marks.use(jax.tree.map(lambda a: a[1:], params))
        x = batch["x"]
        for i in range(2):
            x = jnp.tanh(x @ w["w"][i] + w["b"][i][None])
        return mean_of(x)

    def vmapped(params, batch):
        x = jax.vmap(lambda w: body(batch["x"], w)[0])(params)
        return mean_of(x.sum(0))

    for one in loss, reshaped, gathered_in_pairs, vmapped:
        check(one, STACK)


def test_a_loss_that_looks_at_shapes_before_use_is_told():
    def loss(params, batch):
        def layer(x, w):
            wide = w["b"].shape[0]
            w = marks.use({"w": w["w"], f"b{wide}": w["b"]})
            return jnp.tanh(x @ w["w"]), None

        return mean_of(jax.lax.scan(layer, batch["x"], params)[0])

    refused(loss, STACK, r"received b2 of shape \(2,\), and no such array .*at true shapes")


def test_nnx_scan_carries_its_stack():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), (16, 16)) * 0.3)

        def __call__(self, x):
            state = marks.use({"kernel": self.kernel[...]})
            return jnp.tanh(x @ state["kernel"])

    stack = nnx.vmap(lambda key: Layer(nnx.Rngs(params=key)))(
        jax.random.split(jax.random.key(0), 3)
    )
    graphdef, params = nnx.split(stack)
    forward = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)

    def loss(params, batch):
        return mean_of(forward(batch["x"], nnx.merge(graphdef, params)))

    check(loss, params)


def test_arrays_that_are_not_stacked_have_a_use_of_their_own():
    """The embedding and the head; gathered again where they are rematerialised."""
    params = {"embed": draw(16, 24), "layers": {"k": draw(3, 24, 24)}, "head": draw(24, 8)}

    def loss(params, batch, inside=marks.use):
        x = batch["x"] @ inside({"embed": params["embed"]})["embed"]
        layer = lambda x, w: (jnp.tanh(x @ marks.use(w)["k"]), None)  # noqa: E731
        x = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])[0]
        head = lambda x, w: x @ inside({"head": w})["head"]  # noqa: E731
        return mean_of(jax.checkpoint(head)(x, params["head"]))

    layers = lambda path: path.startswith("layers")  # noqa: E731
    own = check(loss, params, layers)
    start = check(lambda p, b: loss(p, b, lambda w: w), params, layers)
    share = lambda *shape: 4 * np.prod(shape) * 7 / 8  # noqa: E731
    once = share(16, 24) + 2 * share(3, 24, 24) + share(24, 8)
    assert start["all-gather"].ring_bytes == once
    assert own["all-gather"].ring_bytes == once + share(24, 8)
    assert own["reduce-scatter"].ring_bytes == start["reduce-scatter"].ring_bytes
