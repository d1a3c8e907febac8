"""Runs: what is stopped and goes on equals what was not stopped, bit for bit."""

import contextlib
import dataclasses
import functools
import gzip
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from importlib import resources
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sampling import marked

from shardwise import __main__ as command
from shardwise import checkpoint, data, layouts, marks, mesh, objective, run, topology
from shardwise.layouts import first_call
from shardwise.run import decoder, profiling, reports, signals, state, training
from shardwise.run.folder import Folder
from shardwise.run.optimizers import Guarded, averaged, guarded
from shardwise.run.settings import Data, Evaluation, flat, from_flat
from shardwise.train import Optimizer

F32 = np.float32
TX = optax.adam(1e-2)  # one object, so that runs share their programs


def slow(case):
    """Left out by `make test`, where another case of its kind is in."""
    return pytest.param(case, marks=pytest.mark.slow)


def create(key):
    """A model of nobody's library: a dict with a matrix, a bias and noise on its inputs."""
    return {"w": jax.random.normal(key, (12, 3)) / 4, "b": jnp.zeros(3)}


def loss(params, batch, key=None):
    x = batch["x"]
    if key is not None:
        row = jax.vmap(lambda r: jax.random.fold_in(run.stream(key, "noise"), r))
        x = (
            x
            + jax.vmap(lambda k: jax.random.normal(k, (12,)))(row(marks.index("rows", len(x)))) / 8
        )
    error = (jnp.tanh(x @ params["w"] + params["b"][None]) - batch["y"]) ** 2
    return objective.Mean(error.sum(), jnp.asarray(error.size, F32))


def rows(bad=(), at=None):
    """Rows of a fixed problem; those in `bad` are infinite, and reading row `at` sends a signal."""

    def row(i):
        if i == at:
            os.kill(os.getpid(), signal.SIGTERM)
        draw = np.random.default_rng(i)
        x = draw.normal(size=12).astype(F32)
        y = np.sin(x[:3]).astype(F32)
        return {"x": x, "y": y * (np.inf if i in bad else 1), "row": np.int32(i)}

    return grain.MapDataset.range(10_000).map(row)


def given(folder, **changes):
    base = dict(run=folder, steps=8, batch=8, save_every=3, ema=0.9)
    base |= dict(evaluation=Evaluation(every=4, batches=2))
    base |= dict(processes=run.Processes(hang=1000))  # a busy machine ends no test
    return run.Settings(**base | changes)


def trained(folder, batches=None, flops=None, create=create, facts=None, **changes):
    options = dict(create=create, loss=loss, validation=rows(), tx=TX, flops=flops, facts=facts)
    return run.train(given(folder, **changes), batches=batches or rows(), **options)


def lines(folder):
    return [
        (x["step"], x["loss"], x["gradient_norm"]) for x in reports.read(folder / "metrics.jsonl")
    ]


def whole(result, layout):
    return jax.tree.map(np.asarray, layouts.whole(layout, (result.opt_state)))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Commands choose devices and handle signals for their process, which is other tests' too.

    Only the reference is drawn.
    """
    monkeypatch.setattr(mesh, "_devices", None)
    monkeypatch.setattr(reports, "plot", lambda folder: None)
    yield
    if stop := signals.standing():
        stop.close()


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Runs of one kind share their programs, which each would compile for itself."""
    make, known = state.step_program, {}

    def step_program(layout, loss, has_aux, aux, tx, seed, begun):
        leaves, structure = jax.tree.flatten(begun)
        arrays = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        asked = layout, loss, has_aux, repr(aux), tx, seed, structure, arrays
        if asked not in known:
            known[asked] = make(layout, loss, has_aux, aux, tx, seed, begun)
        return known[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "step_program", step_program)
        patch.setattr(state, "evaluation", functools.cache(state.evaluation))
        for transformation in averaged, guarded:
            name = transformation.__name__
            patch.setattr(training, name, functools.cache(transformation))
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "run"
    return folder, trained(folder, facts={"data": 1})


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The folder of a run of four steps, to go on from in a copy."""
    folder = tmp_path_factory.mktemp("half") / "run"
    trained(folder, steps=4)
    return folder


@pytest.mark.parametrize("stop", [slow(1), 3, slow(5)])
def test_a_run_that_goes_on_is_the_one_that_was_not_stopped(tmp_path, reference, stop):
    trained(tmp_path / "r", steps=stop)
    result = trained(tmp_path / "r", resume=True)
    folder, other = reference
    assert lines(tmp_path / "r") == lines(folder) and len(lines(folder)) == 8
    equal(result.opt_state, other.opt_state)
    equal(result.params, other.params)
    assert [x["loss"] for x in reports.read(tmp_path / "r/evaluations.jsonl")] == [
        x["loss"] for x in reports.read(folder / "evaluations.jsonl")
    ]


def asking(key):
    """`create`, while which the process is asked to stop: before anything is compiled."""
    os.kill(os.getpid(), signal.SIGTERM)
    return create(key)


@pytest.mark.parametrize("early", [False, slow(True)])
def test_a_signal_saves_and_the_run_goes_on_from_there(tmp_path, reference, early):
    before = signal.getsignal(signal.SIGTERM)
    if early:
        first = trained(tmp_path / "r", create=asking)
    else:
        first = trained(tmp_path / "r", batches=rows(at=4 * 8 + 2))  # read ahead of step 5
    assert first.stopped and signal.getsignal(signal.SIGTERM) == before
    assert first.step == 1 if early else first.step < 8
    last = trained(tmp_path / "r", resume=True)
    assert not last.stopped and lines(tmp_path / "r") == lines(reference[0])
    equal(last.opt_state, reference[1].opt_state)


def test_a_file_of_tokens_has_one_name_however_it_was_said():
    """A run that goes on, as a cluster starts it again, compares the name with that of before."""
    assert flat(run.Settings(data=Data(tokens="./a//t.npy")))["data.tokens"] == "a/t.npy"


def test_a_stream_without_an_encoding_is_written_to(monkeypatch):
    class Tee:
        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stdout", Tee())
    reports.say("loss 2.1 \u2713")
    assert sys.stdout.text == "loss 2.1 \u2713\n"


def test_from_join_to_leave_a_signal_is_remembered(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    run.join()
    os.kill(os.getpid(), signal.SIGTERM)  # while a program reads its data, say
    result = trained(tmp_path / "r", steps=2)
    assert result.stopped and result.step == 1
    assert run.leave(result) == signals.STOPPED == 75
    assert signal.getsignal(signal.SIGTERM) == before
    assert run.leave() == 0


@pytest.mark.parametrize(
    "roles",
    [
        dict(data=2, fsdp=4),
        slow(dict(fsdp=8, by="compiler", uneven="replicate")),
        slow(dict(fsdp=8, zero=1)),
        slow(dict(fsdp=2, data=4, microbatches=1)),
    ],
    ids=str,
)
def test_on_another_mesh_it_sees_the_same_rows(tmp_path, reference, half, roles):
    shutil.copytree(half, tmp_path / "r")
    trained(tmp_path / "r", resume=True, layout=run.Roles(**roles))
    np.testing.assert_allclose(lines(tmp_path / "r"), lines(reference[0]), rtol=2e-5)


@pytest.mark.parametrize(
    "roles",
    [dict(data=8), slow(dict(fsdp=8)), slow(dict(fsdp=8, by="compiler", uneven="replicate"))],
    ids=str,
)
def test_what_goes_on_is_laid_out_as_what_is_made_and_is_not_made(tmp_path, monkeypatch, roles):
    layout = run.Roles(**{"fsdp": 1} | roles).layout()
    wanted = layout, create, averaged(TX, 0.9), 0
    made, told = state.create(*wanted), state.abstract(*wanted)
    assert jax.tree.structure(made) == jax.tree.structure(told)
    for x, like in zip(jax.tree.leaves(made), jax.tree.leaves(told), strict=True):
        assert (x.shape, x.dtype) == (like.shape, like.dtype)
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
    trained(tmp_path, steps=2, layout=run.Roles(**{"fsdp": 1} | roles))
    monkeypatch.setattr(state, "create", None)
    trained(tmp_path, steps=3, resume=True, layout=run.Roles(**{"fsdp": 1} | roles))


def test_an_iterator_with_a_position_goes_on_from_it(tmp_path, reference):
    def batches():
        each = rows().batch(8).to_iter_dataset(grain.ReadOptions(num_threads=1))
        return iter(each)

    trained(tmp_path, batches=batches(), steps=5)
    trained(tmp_path, batches=batches(), resume=True)
    assert lines(tmp_path) == lines(reference[0])


def test_batches_without_a_position_are_refused(tmp_path):
    with pytest.raises(TypeError, match="without get_state"):
        trained(tmp_path / "r", batches=iter([{"x": np.zeros((8, 12))}]))


def test_batches_of_another_size_are_refused(tmp_path):
    batches = iter(rows().batch(4).to_iter_dataset(grain.ReadOptions(num_threads=1)))
    with pytest.raises(ValueError, match=r"batches have \[4\] rows, and settings.batch says 8"):
        trained(tmp_path / "r", batches=batches)


def alone(steps):
    """The parameters of one device after each of these steps."""
    params, found = create(state.key_of_seed(0)), []
    opt_state = TX.init(params)
    for step in steps:
        each = [rows()[8 * (step - 1) + i] for i in range(8)]
        batch = jax.tree.map(lambda *x: np.stack(x), *each)
        params, opt_state = _alone(params, opt_state, batch, state.key_of_step(0, step))
        found.append(params)
    return found


@jax.jit
def _alone(params, opt_state, batch, key):
    grads = objective.value_and_grad(loss)(params, batch, key=key)[1]
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def test_a_bad_step_is_skipped_and_its_batch_kept(tmp_path):
    result = trained(tmp_path / "r", batches=rows(bad=[17]), bad="skip")
    found = reports.read(tmp_path / "r/metrics.jsonl")
    assert [x["step"] for x in found if x.get("bad")] == [3] and result.step == 8
    kept = np.load(tmp_path / "r/batches/3.npz")
    assert np.isinf(kept["y"]).any() and kept["row"].tolist() == list(range(16, 24))
    params = alone([1, 2, 4, 5, 6, 7, 8])[-1]  # one device that leaves out that step
    mine = layouts.whole(run.Roles().layout(), result.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), mine, params)


def test_a_bad_step_ends_a_run_with_the_state_before_it(tmp_path, reference, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(run.BadStep, match=r"step 3, .* in r/batches/3.npz.*state of step 2 is"):
        trained("r", batches=rows(bad=[17]))  # the folder is named as it was given
    assert state.saved(Folder(tmp_path / "r"))["step"] == 2
    # Replayed on mended data, it is the run that never saw the bad one.
    trained(tmp_path / "r", resume=True)
    assert lines(tmp_path / "r") == lines(reference[0])


def _alone_infinite(params, batch):
    """A loss that infinite rows make NaN, and its gradients not."""
    known = jnp.nan_to_num(batch["y"], posinf=0, neginf=0)
    error = (batch["x"] @ params["w"] - known) ** 2 + (batch["y"] - known)
    return objective.Mean(error.sum(), jnp.asarray(error.size, F32))


def test_a_loss_alone_that_is_not_finite_is_a_bad_step(tmp_path):
    settings = given(tmp_path / "r", ema=None, steps=5)
    with pytest.raises(run.BadStep, match=r"step 3, with loss nan .* of \d.* of step 2 is"):
        run.train(settings, create, _alone_infinite, rows(bad=[17]), TX)
    settings = dataclasses.replace(settings, resume=True, bad="skip", steps=3)
    after = run.train(settings, create, _alone_infinite, rows(bad=[17]), TX)
    assert after.step == 3 and after.opt_state.bad and after.opt_state.norm > 0
    kept = checkpoint.restore(tmp_path / "r/checkpoints", {"params": after.params}, 2)
    equal(kept["params"], after.params)


def test_a_norm_above_the_limit_is_bad(tmp_path):
    with pytest.raises(run.BadStep, match=r"limit 0\.001"):
        trained(tmp_path / "r", limit=1e-3)


def test_the_mean_of_the_parameters_is_corrected(reference):
    _, result = reference
    seen = alone(range(1, 9))
    weights = 0.9 ** np.arange(7, -1, -1)
    wanted = jax.tree.map(lambda *x: np.tensordot(weights / weights.sum(), np.stack(x), 1), *seen)
    mine = layouts.whole(run.Roles().layout(), result.mean)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), mine, wanted)


def test_correction_makes_the_first_mean_the_parameters():
    tx = averaged(optax.sgd(0.1), 0.99)
    params = {"w": jnp.arange(3.0)}
    updates, new = tx.update({"w": jnp.ones(3)}, tx.init(params), params)
    after = optax.apply_updates(params, updates)
    np.testing.assert_allclose(new.sum["w"] / (1 - 0.99), after["w"], rtol=1e-6)


def test_the_mean_of_bfloat16_parameters_does_not_stand_still():
    tx = averaged(optax.sgd(1.0), 0.999)
    params = {"w": jnp.full(4, 1.0, jnp.bfloat16)}
    held, seen = tx.init(params), []
    for _ in range(50):
        updates, held = tx.update({"w": jnp.full(4, -0.25, jnp.bfloat16)}, held, params)
        params = optax.apply_updates(params, updates)
        seen.append(np.asarray(params["w"], np.float64))
    weights = 0.999 ** np.arange(49, -1, -1)
    wanted = np.tensordot(weights / weights.sum(), np.stack(seen), 1)
    np.testing.assert_allclose(held.sum["w"] / (1 - 0.999**50), wanted, rtol=1e-4)
    assert state.mean(params, Guarded(0.0, False, False, held), 0.999)["w"].dtype == jnp.bfloat16


def test_rows_that_a_filter_left_out_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a filter has left some out"):
        trained(tmp_path, batches=rows().filter(lambda row: row["row"] % 3 > 0))


def test_no_mean_and_vectors_of_aux(tmp_path):
    def with_aux(params, batch):
        mean = loss(params, batch)
        size = objective.Mean(jnp.abs(batch["y"]).sum(), jnp.float32(batch["y"].size))
        seen = {"each": jnp.sum(batch["y"], axis=0), "seen": jnp.float32(len(batch["y"]))}
        return mean, seen | {"size": size}

    options = dict(create=create, loss=with_aux, has_aux=True, validation=rows())
    result = run.train(given(tmp_path, steps=4, ema=None), batches=rows(), **options)
    line = reports.read(tmp_path / "metrics.jsonl")[1]
    batch = np.stack([rows()[i]["y"] for i in range(8, 16)])
    np.testing.assert_allclose(line["each"], batch.sum(0), rtol=1e-5)
    np.testing.assert_allclose(line["size"], np.abs(batch).mean(), rtol=1e-5)
    assert line["seen"] == line["rows"] == 8 and result.step == 4 and result.mean is None
    assert "loss_of_mean" not in reports.read(tmp_path / "evaluations.jsonl")[0]


def test_a_step_is_compiled_beside_the_judgement_and_not_again(tmp_path, caplog):
    settings = given(tmp_path, steps=2, ema=None, evaluation=Evaluation(every=0))
    options = dict(create=create, loss=lambda *args: loss(*args), tx=TX)
    with jax.log_compiles():  # of this thread
        run.train(settings, batches=rows(), **options)
    here = [x for x in caplog.messages if x.startswith("Finished XLA compilation of")]
    assert here and not any("train_step" in x for x in here)


AUX = [("sum", 1.0), ("mean", 1 / 8), ({"seen": "max"}, 1 / 8)]


@pytest.mark.parametrize("aux, expected", marked(AUX, AUX[:2]))
def test_how_aux_of_parts_becomes_one_is_the_users_to_say(tmp_path, aux, expected):
    def with_aux(params, batch):
        return loss(params, batch), {"seen": jnp.float32(len(batch["x"]))}

    settings = given(tmp_path, steps=1, layout=run.Roles(fsdp=8), evaluation=Evaluation(every=0))
    tools = dict(create=create, loss=with_aux, batches=rows(), has_aux=True, aux=aux)
    run.train(settings, **tools)
    assert reports.read(tmp_path / "metrics.jsonl")[0]["seen"] == expected * settings.batch


@pytest.mark.parametrize("name", ["loss", slow("gradient_norm"), "tokens_per_second"])
def test_aux_does_not_take_the_place_of_a_metric(tmp_path, name):
    def with_aux(params, batch):
        return loss(params, batch), {name: jnp.float32(0)}

    with pytest.raises(ValueError, match=f"aux has '{name}', which the metrics have already"):
        run.train(given(tmp_path), create, with_aux, rows(), optax.sgd(0.1), has_aux=True)
    assert not reports.read(tmp_path / "metrics.jsonl")


@pytest.mark.slow
def test_steps_that_are_done_again_count_once_as_skipped(tmp_path):
    options = dict(bad="skip", steps=6, save_every=2, evaluation=Evaluation(every=0))
    folder = tmp_path / "r"
    settings = given(folder, **options)
    tools = dict(create=create, loss=loss, batches=rows(bad=[33]))  # row 33 is of step 5
    run.train(settings, **tools)
    rates = [line["learning_rate"] for line in reports.read(folder / "metrics.jsonl")]
    shutil.rmtree(folder / "checkpoints" / "6")  # as if it had been killed while saving
    run.train(dataclasses.replace(settings, resume=True), **tools)
    assert [x["learning_rate"] for x in reports.read(folder / "metrics.jsonl")] == rates


def test_a_halted_guard_changes_nothing_any_more():
    tx = guarded(optax.sgd(0.1), halt=True)
    params = {"w": jnp.ones(2)}
    held = tx.init(params)
    _, held = tx.update({"w": jnp.array([jnp.nan, 0.0])}, held, params)
    updates, held = tx.update({"w": jnp.ones(2)}, held, params)
    assert held.halted and not held.bad and not updates["w"].any()


@pytest.mark.parametrize("kept", [functools.partial(averaged, decay=0.9), guarded])
def test_a_transformation_that_takes_no_further_arguments_may_be_kept(kept):
    tx, params = kept(optax.scale(-0.1)), {"w": jnp.ones(2)}
    updates, _ = tx.update(params, tx.init(params), params, value=jnp.ones(()))
    equal(updates, {"w": -0.1 * params["w"]})


def test_streams_are_independent_and_the_seed_s_alone():
    key = state.key_of_step(3, 7)
    assert (run.stream(key, "noise") == run.stream(state.key_of_step(3, 7), "noise")).all()
    found = {tuple(jax.random.key_data(run.stream(key, n)).tolist()) for n in ("noise", "dropout")}
    assert len(found) == 2


def test_a_folder_with_a_run_is_not_written_over(tmp_path, reference):
    before = (reference[0] / "metrics.jsonl").read_text()
    with pytest.raises(FileExistsError, match="has a run already"):
        trained(reference[0])
    assert (reference[0] / "metrics.jsonl").read_text() == before


def test_other_settings_are_named(reference):
    with pytest.raises(ValueError, match="seed was 0 and is 5; batch was 8 and is 16"):
        trained(reference[0], resume=True, seed=5, batch=16)


def test_a_run_is_drawn(reference):
    assert (reference[0] / "metrics.png").stat().st_size > 5000


def test_a_run_folder_has_the_settings_that_were_used(tmp_path, reference, capsys):
    folder, _ = reference
    assert command.main(["sample", str(folder)]) == 1
    assert "trained a model of its own, and no decoder" in capsys.readouterr().err
    names = {name.partition(".")[0] for name in Folder(folder).settings()}
    assert {"seed", "batch", "layout", "evaluation"} <= names
    assert not names & {"model", "data", "sequence", "devices", "optimizer"}
    options = dict(create=create, loss=loss, batches=rows())  # whose optimizer the settings name
    run.train(given(tmp_path, steps=1), **options)
    assert Folder(tmp_path).settings()["optimizer.peak"] == Optimizer().peak
    with pytest.raises(ValueError, match=r"optimizer\.peak was"):
        again = given(tmp_path, resume=True, optimizer=Optimizer(peak=0.1))
        run.train(again, **options)


# All rows of the first batch have a weight of 0, of which no number tells anything.
@pytest.mark.filterwarnings("ignore:run.train. whether the loss:UserWarning")
@pytest.mark.parametrize("scalar", [False, slow(True)])
def test_a_held_out_loss_is_that_of_one_large_batch(tmp_path, scalar):
    """Of rows that count from none to many: a mean of the batches' means is another number."""

    def weighed(params, batch):
        error = jnp.sum((batch["x"] @ params["w"] - batch["y"]) ** 2, axis=1)
        if scalar:
            return error.mean()
        return objective.Mean(jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"]))

    held = rows().map(lambda row: row | {"weight": F32(row["row"] ** 2 * (row["row"] >= 8))})
    options = dict(create=create, loss=weighed, batches=held, validation=held)
    settings = given(tmp_path, steps=4, evaluation=Evaluation(every=4, batches=3))
    result = run.train(settings, **options)
    (found,) = reports.read(tmp_path / "evaluations.jsonl")
    params = layouts.whole(run.Roles().layout(), result.params)
    batch = jax.tree.map(lambda *x: np.stack(x), *[held[i] for i in range(3 * 8)])
    wanted = objective.value_and_grad(weighed)(params, batch)[0]
    np.testing.assert_allclose(found["loss"], wanted, rtol=1e-5)


def test_a_run_that_is_done_says_its_loss_again(reference):
    again = trained(reference[0], resume=True)
    assert again.loss == reference[1].loss and again.step == 8


def test_other_rows_are_named(reference):
    with pytest.raises(ValueError, match="other facts: first rows"):
        trained(reference[0], batches=rows().shuffle(seed=1), resume=True)


def test_a_key_goes_by_its_name(tmp_path):
    def unnamed(params, batch, rng):
        return loss(params, batch, rng)

    with pytest.raises(TypeError, match=r"'rng'.*call it key"):
        run.train(given(tmp_path), create=create, loss=unnamed, batches=rows())


def test_other_data_are_named(reference):
    with pytest.raises(ValueError, match="other facts: data was 1 and is 2"):
        trained(reference[0], facts={"data": 2}, resume=True)
    with pytest.raises(ValueError, match=r"rate was None and is 0\.1"):
        trained(reference[0], facts={"data": 1, "rate": 0.1}, resume=True)


def test_a_line_cut_off_while_it_was_written_is_left_out(tmp_path):
    file = tmp_path / "m.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')
    reports.cut(file, 2)
    reports.add(file, {"step": 2, "loss": float("nan")})
    assert reports.read(file) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": "nan"}]


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b"7", b"{}", b'{"step": "3", "loss": 1.0}', b'{"step": 3, "loss": []}']
)
@pytest.mark.parametrize("name", ["metrics", "evaluations"])
def test_damaged_lines_are_named_and_nothing_is_lost(tmp_path, half, line, name):
    shutil.copytree(half, tmp_path / "r")
    file = tmp_path / "r" / f"{name}.jsonl"
    file.write_bytes(file.read_bytes() + line + b"\n")
    before = {f: f.read_bytes() for f in (tmp_path / "r").glob("*.json*")}
    number = len(file.read_bytes().splitlines())
    with pytest.raises(ValueError, match=rf"line {number} of .*{name}\.jsonl is damaged.*take the"):
        trained(tmp_path / "r", resume=True)
    assert {f: f.read_bytes() for f in (tmp_path / "r").glob("*.json*")} == before


@pytest.mark.parametrize("name", ["", "processes", "checkpoints", "metrics.jsonl", "settings.json"])
def test_what_lies_in_the_place_of_a_runs_own_is_named(tmp_path, name):
    place = tmp_path / "r" / name if name else tmp_path / "r"
    place.parent.mkdir(exist_ok=True)
    place.mkdir() if "." in name else place.write_text("mine")
    found, wanted = ("folder", "file") if "." in name else ("file", "folder")
    with pytest.raises(ValueError, match=f"{place} is a {found}, and a run has a {wanted} there"):
        trained(tmp_path / "r")


def test_saved_settings_of_another_type_are_named(tmp_path):
    (tmp_path / "settings.json").write_text('{"steps": "many", "seed": 3}')
    with pytest.raises(ValueError, match=r"not of their types .*'steps': 'many'.*Mend settings"):
        run.flags(argv=["--run", str(tmp_path), "--resume"])


def test_settings_that_are_no_object_are_named(tmp_path):
    (tmp_path / "settings.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"holds \[1\]; expected an object of settings"):
        trained(tmp_path, resume=True)


@pytest.mark.parametrize("name", ["a[b]", "a*", "what?"])
def test_a_folder_in_which_orbax_would_not_find_its_files_is_refused(tmp_path, name, monkeypatch):
    with pytest.raises(ValueError, match=r"has .* in it, by which Orbax would look for other"):
        given(tmp_path / name)
    with pytest.raises(ValueError, match="Name a path without"):
        checkpoint.save(tmp_path / name, 1, {"params": jnp.ones(2)})
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(ValueError, match="Name a path without"):
        given("r")


OTHER = """
import sys
from shardwise.run.folder import Folder
from shardwise.run.training import lock_of
lock = lock_of(Folder(sys.argv[1]))
lock.take()
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_run_under_way_is_not_touched_by_another(tmp_path, half):
    shutil.copytree(half, tmp_path / "r")
    words = [sys.executable, "-c", OTHER, str(tmp_path / "r")]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    environment = os.environ | {"PYTHONPATH": str(Path(run.__file__).parents[2])}
    with subprocess.Popen(words, env=environment, **pipes) as other:
        assert other.stdout.readline() == "taken\n"
        before = {f: f.read_bytes() for f in (tmp_path / "r").glob("*.json*")}
        told = rf"another program \(process {other.pid} on .*\) has a run under way in .*Wait until"
        with pytest.raises(RuntimeError, match=told):
            trained(tmp_path / "r", resume=True, steps=6)
        assert {f: f.read_bytes() for f in (tmp_path / "r").glob("*.json*")} == before
        other.stdin.close()
        other.wait()
    assert trained(tmp_path / "r", resume=True, steps=5).step == 5
    with subprocess.Popen(words, env=environment, **pipes) as other:  # it was given back
        assert other.stdout.readline() == "taken\n"


@pytest.mark.parametrize("name", ["TERM", "INT", "QUIT", "HUP", "USR1", "USR2"])
def test_every_signal_that_asks_for_a_stop_is_heard(name):
    assert len(signals.ASKED) == 6
    number = getattr(signal, f"SIG{name}")
    before = signal.signal(number, lambda *_: None)  # so that a failure ends no other test
    try:
        with signals.Stop() as stop:
            os.kill(os.getpid(), number)
            assert stop.signal == number
    finally:
        signal.signal(number, before)


def test_nohup_and_a_terminal_that_tells_twice(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)
    ended = []
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    stop = signals.Stop()
    for numbers, status in (("HUP", "HUP"), []), (("TERM", "HUP"), []), (("HUP", "TERM"), [143]):
        stop._read, written = os.pipe()
        os.write(written, bytes(getattr(signal, f"SIG{name}") for name in numbers))
        os.close(written)
        stop._count()
        assert ended == status


@pytest.mark.parametrize("kind", ["full", slow("closed"), slow("unread")])
def test_output_that_cannot_be_written_ends_no_run(tmp_path, kind, monkeypatch, capfd):
    kept = os.dup(1)  # a run puts nothing in its place
    try:
        if kind == "full":
            out = open("/dev/full", "w")
        else:
            unread, written = os.pipe()
            os.close(unread)
            out = os.fdopen(written, "w")
        if kind == "closed":
            with contextlib.suppress(OSError):
                out.close()
        monkeypatch.setattr("sys.stdout", out)
        assert trained(tmp_path / "r", steps=2).step == 2
        assert len(lines(tmp_path / "r")) == 2 and sys.stdout.name == os.devnull
        sys.stdout.close()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        with contextlib.suppress(OSError):
            out.close()
    assert capfd.readouterr().err.count("run: no more output") == 1


def test_a_command_without_standard_output_gets_one(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert command.main(["--help"]) == 0 and sys.stdout.name == os.devnull
    sys.stdout.close()


def test_the_commands_that_a_run_prints_are_quoted(tmp_path, monkeypatch, capsys):
    class Ended:
        stopped = False

    folder = tmp_path / "it's $(x) here"
    monkeypatch.setattr(decoder, "train", lambda settings: Ended)
    assert command.main(["train", "--run", str(folder), "--devices", "8"]) == 0
    told = capsys.readouterr().out
    assert f"shardwise train --run {shlex.quote(str(folder))} --resume --steps 600" in told
    assert f"shardwise sample {shlex.quote(str(folder))}\n" in told


def test_a_trace_tells_compute_from_collectives(tmp_path):
    trained(tmp_path / "r", steps=6, profile="3:5")
    ops = profiling.read(tmp_path / "r" / "profile")
    found = profiling.times(ops)
    assert {step for step, _ in found} == {0, 1, 2} and {device for _, device in found} == set(
        range(8)
    )
    names = {op.name.partition(".")[0] for op in ops if op.collective}
    told = ("all-", "all_", "psum", "reduce-", "reduce_")
    assert names and all(name.startswith(told) for name in names)
    for each in found.values():
        assert each.compute > 0 and each.collectives >= each.waiting >= 0 and each.idle >= 0
    assert profiling.table(found).count("\n") == 24
    assert profiling.draw(ops, tmp_path / "p.png").stat().st_size > 5000


def test_a_trace_of_a_gpu_has_its_kernels_run_by_run(tmp_path):
    """Recorded on an H200: four steps of one program, the last handed over 20 ms late."""
    packed = resources.files("shardwise_book").joinpath("traces/h200.xplane.pb.gz").read_bytes()
    trace = gzip.decompress(packed)
    for size in 1, len(trace) // 2, len(trace) - 1:
        (tmp_path / "one.xplane.pb").write_bytes(trace[:size])
        with pytest.raises(ValueError, match="is no whole trace"):
            profiling.read(tmp_path)
    (tmp_path / "one.xplane.pb").write_bytes(trace)
    ops = profiling.read(tmp_path)
    assert [len(run) for run in profiling.runs(ops)] == [551] * 4  # of the 2,204 on its stream
    assert profiling.compilations(ops) == {"jit_run": 1}
    found = profiling.times(ops)
    assert list(found) == [(step, 0) for step in range(4)]
    for each in found.values():
        assert each.compute == pytest.approx(12.8e-3, rel=0.01) and each.collectives == 0
        assert each.idle == pytest.approx(0.32e-3, rel=0.05)
    assert [gap > 0.02 for gap in profiling.gaps(ops)] == [False, False, True]
    assert sum(op.name.startswith("nvjet") for op in ops) > 100  # NVIDIA's products


def test_gaps_are_from_the_last_that_ends_to_the_first_that_begins():
    """Of steps of two devices, in seconds; operations of other programs do not count."""
    at = {0: (0, 5e8), 1: (1e8, 6e8)}, {0: (9e8, 1e9), 1: (8e8, 12e8)}, {0: (2e9, 3e9)}
    steps = [(n, *each) for n, found in enumerate(at) for each in found.items()]
    ops = [
        profiling.Op(device, "dot", profiling.STEP, 1, n, *when, False, 0.0)
        for n, device, when in reversed(steps)
    ]
    other = ops[0]._replace(program="jit_other", start=6.5e8, stop=7e8)
    np.testing.assert_allclose(profiling.gaps([*ops, other]), [0.2, 0.8])


def test_a_profile_that_is_no_range_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected the first and the last step"):
        run.Settings(profile="10-13")
    with pytest.raises(FileNotFoundError, match="no trace in"):
        profiling.read(tmp_path)
    (tmp_path / "half.xplane.pb").write_bytes(b"\n\xff\xffdevice")
    with pytest.raises(ValueError, match=r"half\.xplane\.pb is no whole trace"):
        profiling.read(tmp_path)
    with pytest.raises(ValueError, match="no operation of a device"):
        profiling.times([])


def test_cudnns_kernel_is_not_for_packed_rows():
    layout = dataclasses.replace(run.Settings().layout, kernel="cudnn")
    run.Settings(layout=layout)
    with pytest.raises(ValueError, match=r"layout.kernel=cudnn takes rows of one; .* tiles"):
        run.Settings(layout=layout, data=Data(packed=True))


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(steps=0), "steps=0; expected 1 or more"),
        (dict(seed=-1), "seed=-1; expected 0 or more"),
        (dict(ema=1.0), "ema=1.0; expected a decay between 0 and 1"),
        (dict(limit=-1.0), "limit=-1.0; expected a norm above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(change, told):
    with pytest.raises(ValueError, match=told):
        run.Settings(**change)


def test_settings_go_to_json_and_back():
    original = run.Settings(
        run=Path("x"), limit=2.5, profile="3:5", layout=run.Roles(context=2, attention="zigzag")
    )
    for each in (original, run.Settings()):
        values = json.loads(json.dumps(flat(each)))
        assert from_flat(values) == each


def test_flags_become_settings():
    words = "--layout.fsdp 4 --layout.context 2 --layout.attention zigzag --model.dtype bfloat16"
    made = run.flags(argv=[*words.split(), "--run", "somewhere", "--ema", "None"])
    assert (made.layout.fsdp, made.layout.context, made.layout.attention) == (4, 2, "zigzag")
    assert made.model.dtype == jnp.bfloat16 and made.ema is None and made.run == Path("somewhere")


def test_a_run_that_goes_on_has_its_own_settings_but_for_who_runs_it(tmp_path):
    first = ["--run", str(tmp_path), "--seed", "4", "--profile", "3:4", "--processes.hang", "60"]
    alone = ["--processes.address", "127.0.0.1:1", "--processes.count", "2"]
    made = run.flags(argv=[*first, *alone, "--processes.index", "1"])
    Folder(tmp_path).write_settings(flat(made))
    again = run.flags(argv=["--run", str(tmp_path), "--resume", "--steps", "7"])
    assert (again.seed, again.steps, again.resume, again.profile) == (4, 7, True, None)
    assert again.processes == run.Processes(hang=60.0)


def test_a_misspelt_flag_is_told_what_is_near(capsys):
    with pytest.raises(SystemExit):
        run.flags(argv=["--layout.fdsp", "4"])
    assert "--layout.fsdp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("roles", "told"),
    [
        (dict(fsdp=3), "does not fit 8 devices"),
        (dict(fsdp=2), r"layout\(fsdp=2\) does not fit 8 devices: .*--layout.fsdp -1"),
        (dict(fsdp=-1, data=-1), "at most one -1"),
        (dict(fsdp=4, context=2, attention="rnig"), "attention='rnig'; expected one of 'ring'"),
        (dict(remat="all"), "remat='all'; expected one of"),
        (dict(remat="save_only_these_names"), "remat='save_only_these_names'; expected one of"),
    ],
)
def test_layouts_that_cannot_be_are_refused(roles, told):
    mesh.simulate(8)
    with pytest.raises(ValueError, match=told):
        run.Roles(**roles).layout()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(name="adamz"), "no such function"),
        (dict(name="lars_"), "no such function"),
        (dict(schedule="piecewise_interpolate_schedule"), "needs interpolate_type"),
        (dict(moments="float8"), "moments='float8'; expected bfloat16"),
        (dict(name="lamb", moments="bfloat16"), "moments='bfloat16', and optax.lamb has no"),
        (dict(name="sgd", weight_decay=0.05), r"weight_decay=0.05, and optax.sgd has no"),
        (dict(name="scale_by_adam"), r"schedule='warm.*scale_by_adam has no .* \(learning_rate\)"),
        (dict(end=1e-4), r"end=0.0001, and optax.warmup_constant_schedule has no"),
        (dict(schedule="constant_schedule", warmup=50), r"warmup=50, and optax.constant_schedule"),
        (dict(schedule="identity"), r"peak=0.003, and optax.identity has no"),
    ],
)
def test_optimizers_that_cannot_be_are_refused(change, told):
    with pytest.raises(ValueError, match=told):
        Optimizer(**change).transformation()


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor", "muon"])
def test_optimizers_go_by_optax_name(name):
    tx = Optimizer(name=name, schedule="warmup_cosine_decay_schedule").transformation()
    tx.init({"w": jnp.ones((4, 4))})


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("warmup_cosine_decay", 0, 1e-4),
        ("cosine_decay", 1e-3, 1e-4),
        ("linear", 1e-3, 1e-4),
        ("constant", 1e-3, 0),
        ("piecewise_constant", 1e-3, 0),  # of one piece
    ],
)
def test_schedules_begin_and_end_where_the_settings_say(name, start, end):
    decay = dict(decay=30, end=end) if end else {}
    rate = Optimizer(schedule=f"{name}_schedule", peak=1e-3, **decay).rate()
    np.testing.assert_allclose([rate(0), rate(40)], [start, end or 1e-3], rtol=1e-6)


def test_half_of_a_cluster_is_told(monkeypatch, capsys):
    with pytest.raises(ValueError, match=r"processes\.count is missing"):
        signals.join(run.Processes(address="127.0.0.1:1", index=0), 8)
    assert signals.standing() is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    signals.join(run.Processes(), 8)
    assert "SLURM_STEP_NODELIST is not" in capsys.readouterr().err
    with pytest.raises(ValueError, match="do not divide among 3"):
        signals.join(run.Processes(address="127.0.0.1:1", index=0, count=3), 8)


def test_mfu_where_the_chip_is_known(tmp_path, monkeypatch):
    """The share of eight v5e's bfloat16 peak, 197 TFLOP/s each; nothing where no chip is known."""
    trained(tmp_path / "none", steps=2, flops=3e12)
    here = dataclasses.replace(topology.CHIPS["v5e"], names=(jax.devices()[0].device_kind,))
    monkeypatch.setitem(topology.CHIPS, "v5e", here)
    trained(tmp_path / "some", steps=2, flops=3e12)
    assert all("mfu" not in line for line in reports.read(tmp_path / "none/metrics.jsonl"))
    for line in reports.read(tmp_path / "some/metrics.jsonl"):
        rounded = 1e-4 + line["mfu"] * 1e-6 / line["seconds"]  # both are, in the metrics
        assert abs(line["mfu"] - 3e12 / line["seconds"] / (8 * 197e12)) < rounded
        assert line["mfu"] > 0


def test_a_reader_that_has_gone_ends_a_command_in_silence(monkeypatch, capfd):
    for words in ["train", "--help"], ["launch", "local", "--help"], ["--help"]:
        unread, written = os.pipe()
        os.close(unread)
        with os.fdopen(written, "w") as out:
            monkeypatch.setattr("sys.stdout", out)
            assert command.main(words) == 128 + signal.SIGPIPE
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("command_of", [["train", "--run"], ["train", "--resume", "--run"]])
def test_a_run_folder_on_a_bucket_is_refused(command_of, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="gs://bucket/x is an address, and a run folder lies on"):
        run.Settings(run="gs://bucket/x")
    with contextlib.suppress(SystemExit):  # by tyro, for what is no setting
        assert command.main([*command_of, "gs://bucket/x"]) == 1
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "is an address, and a run folder lies on a disk" in told
    assert command.main(["sample", "gs://bucket/x"]) == 1
    assert "is an address" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_messages_of_ours_need_no_traceback(capsys, tmp_path):
    words = ["train", "--run", str(tmp_path), "--layout.fsdp", "3"]
    assert command.main(words) == 1
    told = capsys.readouterr().err
    assert told.startswith("shardwise: run: layout(fsdp=3) does not fit 8 devices")
    assert "Traceback" not in told
    assert command.main(["sample", str(tmp_path / "none")]) == 1
    assert "is no run folder" in capsys.readouterr().err
    assert command.main(["tarin"]) == 2 and "no command 'tarin'" in capsys.readouterr().err
    assert command.main([]) == 2


@pytest.mark.parametrize(
    ("error", "traced"),
    [
        (ValueError("any text"), False),
        (OSError(28, "No space left on device"), False),
        (run.BadStep("run: bad step 3"), False),
        (objective.Indivisible("rows look at each other"), False),
        (KeyError("run: layouts"), True),
        (TypeError("run: what a caller of ours did wrong"), True),
        (NotImplementedError("checkpoint: not yet"), True),
        (jax.errors.JaxRuntimeError("mesh: RESOURCE_EXHAUSTED"), True),
    ],
    ids=lambda x: type(x).__name__,
)
def test_the_type_of_an_error_decides_on_its_traceback(error, traced, monkeypatch, capsys):
    def train(settings):
        raise error

    monkeypatch.setattr(decoder, "train", train)
    assert command.main(["train", "--devices", "8"]) == 1
    told = capsys.readouterr().err
    assert ("Traceback" in told) == traced
    assert traced or told == f"shardwise: {error}\n"
    monkeypatch.setenv("SHARDWISE_TRACEBACK", "1")
    assert command.main(["train", "--devices", "8"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_text_of_a_folder_is_split_by_file(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"document {i} " * 5)
    source = Data(text=str(tmp_path))
    train, held = (decoder.documents(source, split) for split in ("train", "validation"))
    assert len(train) + len(held) == 40 and len(held) > 0
    assert decoder.fingerprint(source) == decoder.fingerprint(Data(text=f"{tmp_path}/*.txt"))
    with pytest.raises(FileNotFoundError, match="no files at"):
        decoder.documents(Data(text=str(tmp_path / "none")))


def test_tokens_are_read_where_they_are_needed(tmp_path):
    array = np.arange(1000, dtype=np.uint16) % 700
    np.save(tmp_path / "t.npy", array)
    source = Data(tokens=tmp_path / "t.npy")
    each = data.rows(decoder.documents(source), 16, 0)
    for row in itertools.islice((each[i] for i in range(5)), 5):
        real = row["mask"].astype(bool)
        assert (row["targets"][real] == (row["tokens"][real] + 1) % 700).all()
    assert decoder.vocabulary(source) == 700
    (document,) = decoder.documents(source)
    assert isinstance(document, np.memmap) and document.size == 900
    np.save(tmp_path / "f.npy", np.zeros(30))
    with pytest.raises(ValueError, match="expected token numbers"):
        decoder.documents(Data(tokens=tmp_path / "f.npy"))


def test_a_new_run_judges_its_loss_and_one_that_goes_on_does_not(tmp_path, monkeypatch):
    def neighbours(params, batch):
        z = jnp.tanh(batch["x"] @ params["w"])
        return jnp.mean(z * jnp.roll(z, 1, axis=0))

    options = dict(create=create, batches=rows(), tx=TX)
    settings = given(tmp_path / "wrong", evaluation=Evaluation(every=0), ema=None)
    with pytest.raises(objective.Indivisible, match="look at each other"):
        run.train(settings, loss=neighbours, **options)
    settings = dataclasses.replace(settings, run=tmp_path / "right", steps=1)
    run.train(settings, loss=loss, **options)
    monkeypatch.setattr(first_call, "judge", None)
    run.train(dataclasses.replace(settings, steps=2, resume=True), loss=loss, **options)
