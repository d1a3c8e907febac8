import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from shardwise import context, data, marks, measure, mesh, model, objective

ORDERS = [context.contiguous, context.striped, context.zigzag]
FORMS = [context.ring, context.all_gather, context.ulysses]


def window(query, key):
    return marks.causal(query, key) & (query.index - key.index < 5)


def prefix(query, key):
    return marks.causal(query, key) | (key.positions < 3) & (key.documents == query.documents)


def both_ways(query, key):
    return query.documents == key.documents


MASKS = [marks.causal, window, prefix, both_ways]


def random_case(rows, length, heads, kv_heads, size, order, n, seed=0, dtype=jnp.float32):
    """(q, k, v, weights of the output), `Places` of packed documents, and the order [length].

    `size` is of a head's entries, or two: of queries and keys, and of values.
    """
    draw = np.random.default_rng(seed)
    size, depth = size if isinstance(size, tuple) else (size, size)
    arrays = [
        draw.normal(size=(rows, length, *last)).astype(dtype)
        for last in ((heads, size), (kv_heads, size), (kv_heads, depth), (heads, depth))
    ]
    documents = np.sort(draw.integers(0, 3, (rows, length)), axis=1)
    positions = [[row[:i].tolist().count(row[i]) for i in range(length)] for row in documents]
    batch = {"documents": documents, "positions": np.array(positions)}
    batch = {name: x.astype(np.int32) for name, x in batch.items()}
    return arrays, marks.places(batch, rows, length), order(length, n)


def run(attend, arrays, places, mask):
    """Output and gradients of sum(output × weights), in float32."""

    def total(q, k, v):
        out = attend(q, k, v, places, mask)
        return jnp.sum(out.astype(jnp.float32) * arrays[3]), out

    (_, out), grads = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*arrays[:3])
    return [x.astype(jnp.float32) for x in (out, *grads)]


def over_devices(form, n, mask, manual=run):
    """`run` over n devices that cut the sequence: a jitted function of arrays and places."""
    line = mesh.make(context=n)
    return jax.jit(
        jax.shard_map(
            lambda arrays, places: manual(form, arrays, places, mask),
            mesh=line,
            in_specs=P(None, "context"),
            out_specs=P(None, "context"),
            check_vma=False,
        )
    )


def in_order(tree, order):
    return jax.tree.map(lambda x: np.asarray(x)[:, order], tree)


def assert_equal_to_one_device(form, n, mask, arrays, places, order, rtol=1e-6):
    one = jax.jit(functools.partial(run, marks.attend, mask=mask))(arrays, places)
    lowered = over_devices(form, n, mask).lower(*in_order((arrays, places), order))
    compiled = lowered.compile()
    assert_bytes_are_the_formula(form, n, lowered, compiled, *arrays[:3])
    many = compiled(*in_order((arrays, places), order))
    for a, b in zip(in_order(many, np.argsort(order)), one, strict=True):
        # Sums in another order: some float32 roundings of the largest entries.
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(1, np.abs(b).max()))


def assert_bytes_are_the_formula(form, n, lowered, compiled, q, k, v):
    expected = sum(form.bytes_sent(n, q, k, v))
    assert measure.collectives(lowered).ring_bytes == expected
    if n > 2 or not isinstance(form, context.ring):  # XLA merges the only hop of both passes
        assert measure.collectives(compiled).ring_bytes == expected


def copied(axis):
    return context.ulysses(axis, copies=2)


@pytest.mark.parametrize("form", FORMS)
def test_no_rows_are_attention_to_nothing(form):
    attend = context.within(mesh.make(context=4), "context", form("context"))
    case = random_case(1, 16, 8, 4, 4, context.contiguous, 4)
    arrays, places = jax.tree.map(lambda x: x[:0], case[:2])
    found = jax.jit(functools.partial(run, attend, mask=marks.causal))(arrays, places)
    assert [x.shape for x in found] == [arrays[3].shape, *(x.shape for x in arrays[:3])]


# Rows, length, heads, kv heads, head_dim, n; lengths even and odd, groups of 1 to 4.
CASES = [
    (2, 24, 4, 2, (6, 4), 4, context.ring, context.zigzag, prefix),
    (1, 27, 3, 3, 4, 3, context.ring, context.contiguous, window),
    (2, 24, 4, 2, (3, 5), 4, context.all_gather, context.striped, marks.causal),
    (1, 32, 8, 2, (4, 6), 4, copied, context.zigzag, prefix),
    (1, 35, 2, 1, 4, 5, context.ring, context.striped, both_ways),
    (2, 16, 4, 1, 4, 2, context.ring, context.zigzag, marks.causal),
    (1, 9, 4, 1, 4, 3, context.all_gather, context.contiguous, window),
    (2, 14, 6, 2, 4, 2, context.ulysses, context.striped, prefix),
]
CASES = [
    pytest.param(c, marks=[pytest.mark.slow] * (i not in (0, 2, 3))) for i, c in enumerate(CASES)
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(x.__name__ for x in c[6:]))
def test_every_form_equals_one_device(case):
    *sizes, n, form, order, mask = case
    arrays, places, order = random_case(*sizes, order, n)
    assert_equal_to_one_device(form("context"), n, mask, arrays, places, order)


@pytest.mark.slow
@given(choice=st.data())
@settings(max_examples=8)
def test_random_cases_equal_one_device(choice):
    draw = lambda *options: choice.draw(st.sampled_from(options))  # noqa: E731
    form, order, mask = draw(*FORMS), draw(*ORDERS), draw(*MASKS)
    n, kv_heads, group = (
        draw(2, 3, 4, 8),
        choice.draw(st.integers(1, 3)),
        choice.draw(st.integers(1, 3)),
    )
    if form is context.ulysses:
        kv_heads *= n
    length = 2 * n * choice.draw(st.integers(1, 5))
    rows, size = choice.draw(st.integers(1, 2)), draw(2, 6, (6, 4), (2, 3))
    seed = choice.draw(st.integers(0, 99))
    sizes = rows, length, kv_heads * group, kv_heads, size
    arrays, places, order = random_case(*sizes, order, n, seed)
    assert_equal_to_one_device(form("context"), n, mask, arrays, places, order, rtol=2e-6)


@pytest.mark.slow
def test_bfloat16_is_as_near_to_the_truth_as_on_one_device():
    sizes = 2, 32, 4, 2, 8
    exact, places, order = random_case(*sizes, context.zigzag, 4)
    exact = [x.astype(jnp.bfloat16).astype(np.float32) for x in exact]
    rounded = [x.astype(jnp.bfloat16) for x in exact]
    truth = jax.jit(functools.partial(run, marks.attend, mask=window))(exact, places)
    one = jax.jit(functools.partial(run, marks.attend, mask=window))(rounded, places)
    many = over_devices(context.ring("context"), 4, window)(*in_order((rounded, places), order))
    many = in_order(many, np.argsort(order))
    for a, b, c in zip(many, one, truth, strict=True):
        # 0.75 to 1.03 of one device's mean error; with sums in bfloat16, 1.2 to 1.9.
        assert np.abs(a - c).mean() <= 1.1 * np.abs(b - c).mean()


def test_a_query_that_sees_no_key_is_loud_everywhere():
    arrays, places, _ = random_case(1, 8, 2, 2, 2, context.contiguous, 2)
    blind = lambda q, k: (k.index <= q.index) & (q.index != 5)  # noqa: E731
    one = np.asarray(jax.jit(lambda *given: marks.attend(*given, blind))(*arrays[:3], places))
    forward = lambda form, arrays, places, mask: form(*arrays[:3], places, mask)  # noqa: E731
    many = over_devices(context.ring("context"), 2, blind, forward)(arrays, places)
    np.testing.assert_array_equal(np.isnan(many), np.isnan(one))
    assert np.isnan(one[0, 5]).all() and np.isfinite(np.delete(one, 5, axis=1)).all()


def abstract(form, n, length, heads=8, kv_heads=4, manual=run, dtype=jnp.float32):
    """The lowered program of `run`, forward and backward."""
    shape = lambda h: jax.ShapeDtypeStruct((2, length, h, 16), dtype)  # noqa: E731
    arrays = [shape(h) for h in (heads, kv_heads, kv_heads, heads)]
    places = marks.Places(*[jax.ShapeDtypeStruct((2, length), jnp.int32)] * 3)
    return over_devices(form, n, marks.causal, manual).lower(arrays, places), arrays


def forward_alone(form, arrays, places, mask):
    return form(*arrays[:3], places, mask)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("form", "n"),
    [*((form("context"), 4) for form in FORMS), (context.ulysses("context", copies=2), 8)],
)
def test_bytes_written_are_the_formula(form, n, dtype):
    # The CPU's compiler makes float32 of bfloat16 collectives: the lowered text has what is meant.
    for manual in run, forward_alone:
        lowered, (q, k, *_) = abstract(form, n, 64, manual=manual, dtype=dtype)
        sent = form.bytes_sent(n, q, k)
        expected = sum(sent) if manual is run else sent.forward
        assert measure.collectives(lowered).ring_bytes == expected


def test_the_formulas_are_the_published_ones():
    e, b, s, heads, kv_heads, d, n = 4, 2, 64, 8, 4, 16, 4
    q, k = (jax.ShapeDtypeStruct((b, s, h, d), jnp.float32) for h in (heads, kv_heads))
    kv, places = 2 * b * s * kv_heads * d * e, 12 * b * s * (n - 1) // n
    ring, gather, ulysses = (form("context").bytes_sent(n, q, k) for form in FORMS)
    assert ring == (kv * (n - 1) // n + places, kv * (2 * n - 1) // n + places)
    assert gather == (kv * (n - 1) // n + places, kv * (n - 1) // n)
    exchanged = 2 * (heads + kv_heads) * b * s * d * e * (n - 1) // n**2
    assert ulysses == (exchanged + places, exchanged)


@pytest.mark.slow
def test_what_the_ring_needs_does_not_grow_with_the_sequence():
    temporary = {
        (length, n): abstract(context.ring("context"), n, length)[0].compile().memory_analysis()
        for length, n in [(512, 2), (1024, 4), (1024, 2)]
    }
    first, both, longer = (m.temp_size_in_bytes for m in temporary.values())
    assert both <= 1.2 * first  # twice the devices for twice the tokens
    assert longer <= 2.4 * first  # as many devices: linear, since no block of scores is whole


def test_what_is_kept_for_the_backward_pass_is_a_devices_own():
    def kept(form, n):
        arrays, _, _ = random_case(2, 16 * n, 4, 2, 8, context.contiguous, n)
        pull = lambda q, k, v: jax.tree.leaves(  # noqa: E731
            jax.vjp(lambda *a: form(*a, places_of(q)), q, k, v)[1]
        )
        places_of = lambda q: marks.places(None, *q.shape[:2])  # noqa: E731
        found = jax.eval_shape(
            jax.shard_map(
                lambda *a: [x[None] for x in pull(*a)],
                mesh=mesh.make(context=n),
                in_specs=P(None, "context"),
                out_specs=P("context"),
                check_vma=False,
            ),
            *arrays[:3],
        )
        return sum(x.size * x.dtype.itemsize for x in found) // n

    assert kept(context.ring("context"), 8) == kept(context.ring("context"), 4)
    assert kept(context.all_gather("context"), 8) > kept(context.all_gather("context"), 4)


@pytest.mark.slow
def test_a_ring_over_several_axes_is_one_ring():
    arrays, places, order = random_case(1, 16, 2, 1, 2, context.zigzag, 4)
    cut = P(None, ("pods", "chips"))
    many = jax.jit(
        jax.shard_map(
            lambda arrays, places: forward_alone(
                context.ring(("pods", "chips")), arrays, places, marks.causal
            ),
            mesh=mesh.make(pods=2, chips=2),
            in_specs=cut,
            out_specs=cut,
            check_vma=False,
        )
    )(*in_order((arrays, places), order))
    one = marks.attend(*arrays[:3], places)
    np.testing.assert_allclose(many[:, np.argsort(order)], one, rtol=0, atol=1e-6)


def test_within_code_that_the_compiler_lays_out():
    grid = mesh.make(data=2, context=2, model=2)
    arrays, places, order = random_case(2, 16, 4, 2, 4, context.zigzag, 2)
    heads = jax.sharding.NamedSharding(grid, P("data", "context", "model"))
    tokens = jax.sharding.NamedSharding(grid, P("data", "context"))
    attend = context.within(grid, "context", context.ring("context"), rows=("data",))
    assert hash(attend) == hash(
        context.within(grid, "context", context.ring("context"), rows=("data",))
    )

    def loss(arrays, places):
        with marks.bind(attend=attend):
            return run(marks.attend, arrays, places, window)

    compiled = (
        jax.jit(loss, in_shardings=(heads, tokens), out_shardings=heads)
        .lower(*in_order((arrays, places), order))
        .compile()
    )
    placed = jax.device_put(in_order((arrays, places), order), (heads, tokens))
    one = jax.jit(functools.partial(run, marks.attend, mask=window))(arrays, places)
    for a, b in zip(in_order(compiled(*placed), np.argsort(order)), one, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(1, np.abs(b).max()))
    # Nothing but the ring is sent: heads cut over "model" stay where they are.
    assert {op.kind for op in measure.collectives(compiled).ops} == {"collective-permute"}
    with pytest.raises(
        ValueError, match=r"parameter 'q'.* \(of size 15\) to mesh axis 'context' \("
    ):
        attend(*(x[:, :15] for x in arrays[:3]), in_order(places, slice(15)))


CONFIG = model.Config(embed=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=8, remat=True)


@pytest.mark.slow
def test_a_decoder_with_its_sequence_cut_is_one_devices():
    graphdef, params = nnx.split(nnx.jit(lambda: model.Decoder(CONFIG, nnx.Rngs(0)))())
    batch = next(data.batches(2, 24))
    batch |= {"documents": np.repeat([[0, 1, 2]], 8, axis=1).repeat(2, axis=0).astype(np.int32)}
    loss = functools.partial(model.loss, graphdef=graphdef)
    mean, grads = jax.jit(objective.value_and_grad(loss))(params, batch)
    order = context.zigzag(24, 4)

    def local(params, batch):
        with marks.bind(attend=context.ring("context")):
            found, grads = jax.value_and_grad(lambda p: loss(p, batch).total)(params)
        found, grads, count = jax.lax.psum((found, grads, batch["mask"].sum()), "context")
        return found / count, jax.tree.map(lambda g: g / count, grads)

    batch |= {"index": np.broadcast_to(np.arange(24, dtype=np.int32), (2, 24))}
    moved = {name: x[:, order] for name, x in batch.items()}
    program = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh.make(context=4),
            in_specs=(P(), P(None, "context")),
            out_specs=P(),
            check_vma=False,
        )
    ).lower(params, moved)
    # Each layer sends the formula, forward twice: nothing is taken out of the scan and kept.
    q, k = (jax.ShapeDtypeStruct((2, 24, h, 4), jnp.float32) for h in (4, 2))
    sent = context.ring("context").bytes_sent(4, q, k)
    hops = measure.collectives(program)["collective-permute"]
    assert hops.ring_bytes == CONFIG.layers * (2 * sent.forward + sent.backward)
    ours = program.compile()(params, moved)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves((mean, grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * max(1, np.abs(b).max()))


@pytest.mark.parametrize(
    ("order", "critical"),
    [(context.contiguous, 904), (context.striped, 544), (context.zigzag, 520)],
)
def test_the_work_of_each_order(order, critical):
    scores = context.work(order, 4, 64)
    assert scores.max(axis=0).sum() == critical and scores.sum() == 64 * 65 // 2
    seen = np.tril(np.ones((64, 64), bool))[np.ix_(order(64, 4), order(64, 4))]
    for r, t in itertools.product(range(4), range(4)):
        keys = (r - t) % 4
        assert scores[r, t] == seen[16 * r : 16 * r + 16, 16 * keys : 16 * keys + 16].sum()
    documents = np.repeat([0, 1], 32)
    assert context.work(order, 4, 64, documents=documents).sum() == 2 * 32 * 33 // 2
    assert context.work(order, 4, 64, lambda q, k: k.positions < 8, documents).sum() == 64 * 16


def test_work_is_plain_numbers_within_a_trace():
    told = jax.jit(lambda x: x + context.work(context.zigzag, 2, 8).sum())(1)
    assert told == 8 * 9 // 2 + 1


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_is_a_permutation_that_its_inverse_undoes(order):
    x = np.arange(24)
    found = order(24, 4)
    np.testing.assert_array_equal(np.sort(found), x)
    np.testing.assert_array_equal(x[found][np.argsort(found)], x)
    np.testing.assert_array_equal(order(6, 1), np.arange(6))


def test_orders_as_pictured_in_their_papers():
    assert context.striped(8, 4).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert context.zigzag(16, 2).tolist() == [0, 1, 2, 3, 12, 13, 14, 15, *range(4, 12)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: context.contiguous(30, 4), r"30 tokens .* 4 equal chunks; .* such as 28 or 32"),
        (lambda: context.zigzag(12, 4), r"zigzag: .*12 tokens .* 8 equal chunks; .* 8 or 16"),
        (lambda: context.striped(3, 4), r"striped: .*3 tokens .*multiple of 4, such as 4"),
        (lambda: abstract(context.ulysses("context"), 8, 64), r"4 kv heads, copied 1 times for 8 "
         r"heads, .* 8 devices. Cut over \[1, 2, 4\] devices, copy each kv head copies=2 times"),
        (lambda: abstract(context.ulysses("context"), 8, 64, 6, 3), r"6 heads .* 8 devices; 6 "
         r"heads do among \[1, 2, 3, 6\], and ring and all_gather work"),
        (lambda: abstract(context.ring("context"), 2, 2 * 1021), r"1021 tokens on a device .* "
         r"between 16 and 128 tokens; .* has 1024, or give block=1021"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_says_so(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
