"""The first call of a layout's function judges the loss: once, in the memory that there is."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import published
import pytest
from sampling import marked

from shardwise import layouts, mesh, objective
from shardwise.layouts import first_call
from shardwise.objective import Indivisible, beforehand, oracle
from shardwise.objective.trials import Trials

mesh.simulate(8)
PARAMS, LENGTH = {k: published.PARAMS[k] for k in ("w", "b", "u")}, 64
DRAW = np.random.default_rng(1)
BATCH = {
    "x": DRAW.normal(size=(32, published.WIDTH)).astype(np.float32),
    "y": (np.arange(32) % 3).astype(np.int32),
    "r": DRAW.normal(size=32).astype(np.float32),
}
LINE = layouts.Layout(mesh.make(fsdp=8), fsdp="fsdp")
BY_COMPILER = dataclasses.replace(LINE, by="compiler", uneven="replicate")


@pytest.fixture(autouse=True)
def as_others_write():
    """Our own code spells ranks out; that of others does not."""
    with jax.numpy_rank_promotion("allow"):
        yield


def fresh(loss):
    """The loss as nobody has seen it."""
    return functools.partial(loss)


def neighbours(p, b):
    """Silent in a trace: a row beside the one before it."""
    return jnp.mean(published.net(p, b["x"]) * jnp.roll(published.net(p, b["x"]), 1, axis=0))


def right(p, b):
    return published.nats(p, b).mean()


LAYOUTS = {
    "by hand": LINE,
    "microbatches": dataclasses.replace(LINE, microbatches=2),
    "by the compiler, in microbatches": dataclasses.replace(BY_COMPILER, microbatches=2),
}


@pytest.mark.parametrize("name", marked(LAYOUTS, {"by hand"}))
def test_the_first_call_refuses_what_its_layout_would_make_another(name):
    layout = LAYOUTS[name]
    placed = layouts.place(layout, PARAMS)
    with pytest.raises(Indivisible, match="look at each other"):
        layouts.value_and_grad(layout, fresh(neighbours))(placed, BATCH)
    params, state = layouts.init(layout, lambda key: PARAMS, optax.sgd(0.1), jax.random.key(0))
    with pytest.raises(Indivisible, match="look at each other"):
        layouts.step(layout, fresh(neighbours), optax.sgd(0.1))(params, state, BATCH)
    layouts.value_and_grad(layout, fresh(neighbours), check=False)(placed, BATCH)
    layouts.value_and_grad(layout, fresh(right))(placed, BATCH)


def test_whole_arrays_are_divided_by_nobody_and_not_judged(monkeypatch):
    monkeypatch.setattr(oracle, "judge", None)
    placed = layouts.place(BY_COMPILER, PARAMS)
    value, _ = layouts.value_and_grad(BY_COMPILER, neighbours)(placed, BATCH)
    np.testing.assert_allclose(value, neighbours(PARAMS, BATCH), rtol=1e-5)


def test_it_is_judged_once(monkeypatch):
    calls = []
    judge = oracle.judge
    monkeypatch.setattr(oracle, "judge", lambda *given: calls.append(1) or judge(*given))
    loss, placed = fresh(right), layouts.place(LINE, PARAMS)
    run = layouts.value_and_grad(LINE, loss)
    run(placed, BATCH), run(placed, BATCH)
    layouts.value_and_grad(LINE, loss)(placed, BATCH)
    assert len(calls) == 1
    layouts.value_and_grad(LINE, fresh(right))(placed, BATCH)
    assert len(calls) == 2


def test_it_is_judged_once_however_many_rows_parts_have_and_anew_in_another_way(monkeypatch):
    calls, judge, loss = [], oracle.judge, fresh(right)
    monkeypatch.setattr(oracle, "judge", lambda *given: calls.append(1) or judge(*given))
    few = {name: x[:16] for name, x in BATCH.items()}
    fewer = layouts.Layout(mesh.make(fsdp=4), fsdp="fsdp")
    for layout in LINE, fewer:  # two rows in a part, then four
        layouts.value_and_grad(layout, loss)(layouts.place(layout, PARAMS), few)
    assert len(calls) == 1
    several = dataclasses.replace(fewer, microbatches=2)
    layouts.value_and_grad(several, loss)(layouts.place(several, PARAMS), few)
    assert len(calls) == 2


def test_within_a_trace_a_warning_says_so_once():
    placed, run = layouts.place(LINE, PARAMS), layouts.value_and_grad(LINE, fresh(neighbours))
    with pytest.warns(UserWarning, match=r"not judged: within a trace.*objective\.check") as told:
        jax.jit(lambda p, b: run(p, b))(placed, BATCH)
        jax.jit(lambda p, b: run(p, b))(placed, BATCH)
    assert len(told) == 1
    with pytest.raises(ValueError, match="rows"):  # the first call with numbers is judged
        run(placed, BATCH)


def test_shapes_without_numbers_spend_no_judging():
    placed, run = layouts.place(LINE, PARAMS), layouts.value_and_grad(LINE, fresh(neighbours))
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):
        run(placed, jax.eval_shape(lambda: BATCH))
    with pytest.raises(Indivisible, match="rows"):
        run(placed, BATCH)


def test_what_is_lowered_is_not_judged():
    placed = layouts.place(LINE, PARAMS)
    lowered = layouts.value_and_grad(LINE, fresh(neighbours)).lower(placed, BATCH)
    assert "all_reduce" in lowered.as_text()


def test_a_group_of_rows_is_as_large_as_it_is():
    """Eight neighbouring rows of a group on each device: of four, groups would be cut."""

    def grouped(p, b):
        r = b["r"].reshape(-1, 8)
        return jnp.mean(published.nats(p, b) * (r - r.mean(1, keepdims=True)).reshape(-1))

    batch = jax.tree.map(lambda x: np.concatenate([x, x[::-1]]), BATCH)
    placed = layouts.place(LINE, PARAMS)
    value, _ = layouts.value_and_grad(LINE, grouped)(placed, batch)
    np.testing.assert_allclose(value, grouped(PARAMS, batch), rtol=1e-4)
    with pytest.raises(TypeError):  # a microbatch has half of a group on each device
        several = dataclasses.replace(LINE, microbatches=2)
        layouts.value_and_grad(several, grouped)(placed, batch)


# Memory, and work.

TOKENS = {
    "s": DRAW.normal(size=(16, LENGTH, published.WIDTH)).astype(np.float32),
    "t": DRAW.integers(0, published.CLASSES, (16, LENGTH)).astype(np.int32),
    "mask": np.ones((16, LENGTH), np.float32),
}


def tokens_of_rows(p, b):
    return published.over_tokens(b, published.token_nats(p, b))


def centred_tokens(p, b):
    each = published.token_nats(p, b)
    return published.over_tokens(b, (each - each.mean(0)) ** 2)


def judged(loss, seen, layout=LINE, batch=TOKENS):
    """Judge a loss as a layout's first call does; `seen` gets the rows and tokens of a part."""
    placed = layouts.place(layout, PARAMS)
    fitting = beforehand._fitting

    def watched(*given):
        found = fitting(*given)
        seen.append((found.part.rows, found.part.length))
        return found

    beforehand._fitting = watched
    try:
        return first_call.judge(layout, fresh(loss), placed, batch)
    finally:
        beforehand._fitting = fitting


def test_too_little_memory_means_fewer_rows_and_then_a_shorter_sequence(monkeypatch):
    seen, asked, memory = [], [], Trials.memory.fget
    told = property(lambda self: asked.append(memory(self)) or asked[-1])
    monkeypatch.setattr(Trials, "memory", told)
    judged(tokens_of_rows, seen)
    assert seen == [(8, None)]
    monkeypatch.setattr(beforehand, "room", lambda mesh: asked[0] // 2)
    for loss in tokens_of_rows, centred_tokens:
        seen.clear()
        if loss is tokens_of_rows:
            judged(loss, seen)
        else:
            with pytest.raises(Indivisible):
                judged(loss, seen)
        rows, length = seen[0]
        assert rows < 8 or (length or LENGTH) < LENGTH
    monkeypatch.setattr(beforehand, "room", lambda mesh: 10)
    made = lambda *given: pytest.fail("parameters were made before memory was asked")  # noqa: E731
    monkeypatch.setattr(Trials, "_shaken", made)
    few = {name: x[:, :16] for name, x in TOKENS.items()}
    assert "does not fit into memory" in judged(tokens_of_rows, [], batch=few)


def test_a_large_model_is_judged_on_fewer_tokens_first(monkeypatch):
    monkeypatch.setattr(beforehand, "MOST_WORK", 1000)
    seen = []
    judged(tokens_of_rows, seen)
    assert seen == [(8, beforehand.SHORTEST)]
    seen.clear()
    with pytest.raises(Indivisible):
        judged(centred_tokens, seen)
    assert seen == [(8, beforehand.SHORTEST), (8, None)]  # refused by all of its tokens alone
    seen.clear()
    empty = TOKENS | {"mask": (np.arange(LENGTH)[None] >= 20) * np.ones((16, 1), np.float32)}
    judged(tokens_of_rows, seen, batch=empty)  # of a prompt that counts nothing, nothing is told
    assert seen == [(8, beforehand.SHORTEST), (8, None)]


def test_what_cannot_be_judged_is_said():
    placed = layouts.place(LINE, PARAMS)

    def of_four_rows(p, b):
        return right(p, b) + 0 * jnp.zeros(4)[jnp.arange(4)].reshape(len(b["x"]), -1).sum()

    def over_devices(p, b):
        return right(p, b) - 0 * jax.lax.pmean(right(p, b), "fsdp")

    for loss, told in ((of_four_rows, "few rows"), (over_devices, "unbound axis name")):
        with pytest.warns(UserWarning, match=rf"(?s)was not judged.*{told}.*objective\.check"):
            layouts.value_and_grad(LINE, loss)(placed, BATCH)
    zeros = BATCH | {"x": np.full_like(BATCH["x"], np.nan)}
    with pytest.warns(UserWarning, match="its numbers are not finite, or 0"):
        layouts.value_and_grad(LINE, fresh(right))(placed, zeros)


def test_an_error_of_the_loss_itself_is_the_steps():
    placed = layouts.place(LINE, PARAMS)
    pair = lambda p, b: (right(p, b), jnp.float32(1))  # noqa: E731
    with pytest.raises(TypeError, match="bare pair"):
        layouts.value_and_grad(LINE, pair)(placed, BATCH)
    mean = lambda p, b: objective.Mean(right(p, b), 1.0)  # noqa: E731
    with pytest.raises(TypeError, match="returned a Mean, and has_aux=True"):
        layouts.value_and_grad(LINE, mean, has_aux=True)(placed, BATCH)
