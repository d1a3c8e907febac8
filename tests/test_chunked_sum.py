"""A sum over chunks: that of all at once, in every mode of differentiation, and nothing twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise import measure, objective

CHUNKS, ROWS, WIDTH, WORDS = 4, 6, 5, 7
RNG = np.random.default_rng(0)
HEAD, X, WEIGHT = (
    jnp.asarray(RNG.normal(size=shape), jnp.float32)
    for shape in ((WIDTH, WORDS), (CHUNKS, ROWS, WIDTH), (CHUNKS, ROWS))
)
CODES = jnp.asarray(RNG.integers(-2, 3, (WIDTH, WORDS)), jnp.int8)  # a quantised part of the head
TARGETS = jnp.asarray(RNG.integers(0, WORDS, (CHUNKS, ROWS)))


def nats(head, codes, x, targets, weight):
    found = jax.nn.log_softmax(x @ (head + codes))
    return -jnp.sum(weight * jnp.take_along_axis(found, targets[..., None], -1)[..., 0])


def in_chunks(head, codes, *chunks):
    return objective.chunked_sum(lambda chunk: nats(head, codes, *chunk), chunks)


def plain(loss, head, x, weight):
    return loss(head, CODES, x, TARGETS, weight)


def scanned(loss, head, x, weight):
    """As in a loop over microbatches: traced once, then differentiated."""

    def body(total, factor):
        return total + loss(head * factor, 2 * CODES, x, TARGETS, weight), None

    return jax.lax.scan(body, jnp.float32(0), jnp.arange(1.0, 4.0))[0]


def again(loss, *given):
    return jax.checkpoint(functools.partial(scanned, loss))(*given)


def mapped(loss, head, x, weight):
    def one(factor, codes, targets):
        return loss(head * factor, codes, x, targets, weight)

    each = jnp.arange(1.0, 3.0), jnp.stack([CODES, -CODES]), jnp.stack([TARGETS, 6 - TARGETS])
    return jnp.sum(jax.vmap(one)(*each))


@pytest.mark.parametrize("use", [plain, scanned, again, mapped])
def test_it_is_the_sum_at_once_in_every_mode(use):
    """Also of integers that the function closes over, in loops and maps around it."""

    def found(loss):
        of = functools.partial(use, loss)
        of_head = lambda head: of(head, X, WEIGHT)  # noqa: E731
        moves = jnp.cos(HEAD), jnp.sin(X), WEIGHT
        return (
            jax.jit(jax.value_and_grad(of, (0, 1, 2)))(HEAD, X, WEIGHT),
            jax.jit(lambda *at: jax.jvp(of, at, moves))(HEAD, X, WEIGHT),
            jax.jit(jax.hessian(of_head))(HEAD),
            jax.jit(jax.jacrev(jax.grad(of_head)))(HEAD),
        )

    ours, expected = found(in_chunks), found(nats)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * np.abs(b).max())


def test_no_product_is_computed_twice_and_one_chunk_is_there_at_a_time():
    """By the compiled program: as many FLOPs as at once, and a part of the memory."""
    shapes = (64, 4096), (64, 4096), (16, 256, 64), (16, 256), (16, 256)
    dtypes = jnp.float32, jnp.int8, jnp.float32, jnp.int32, jnp.float32
    given = map(jax.ShapeDtypeStruct, shapes, dtypes)
    head, codes, *rest = given
    both = []
    for loss in (in_chunks, nats):
        program = jax.jit(jax.grad(loss, (0, 2))).lower(head, codes, *rest).compile()
        both.append((measure.flops(program), program.memory_analysis().temp_size_in_bytes))
    (flops, memory), (at_once, whole) = both
    assert flops == at_once and memory < whole / 4
    alone = jax.jit(in_chunks).lower(head, codes, *rest).compile()
    assert measure.flops(alone) == at_once / 3


@pytest.mark.parametrize("cotangent", [1.0, 1 / 3000])
def test_gradients_are_summed_and_multiplied_in_float32(cotangent):
    """In bfloat16, which has eight bits, 1 + 1/500 is 1, and 1/3000 is off by 1/400."""
    x = jnp.full((501, 1), 1 / 500, jnp.bfloat16).at[0].set(1)

    def loss(head, x):
        return cotangent * objective.chunked_sum(lambda row: jnp.sum(head * row), x)

    of_head, of_x = jax.grad(loss, (0, 1))(jnp.ones(1, jnp.bfloat16), x)
    assert of_head.dtype == of_x.dtype == jnp.bfloat16
    total = cotangent * np.float64(x).sum()
    assert abs(np.float64(of_head[0]) / total - 1) < 2**-8
    assert abs(np.float64(of_x[0, 0]) / cotangent - 1) < 2**-8


def test_where_there_is_nothing_to_differentiate_it_is_a_sum():
    assert objective.chunked_sum(jnp.sum, jnp.arange(12).reshape(4, 3)) == 66
