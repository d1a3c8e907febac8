"""Stages that take a known time, by sleeping, and what their programs and parts take alone."""

import collections
import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import cut, marks, objective

SECONDS = 0.020
WIDTH = 8


def nominal(seconds):
    """What each kind costs. Stage 0 has nothing to send back: its W does all that B does."""
    kinds = {"F": seconds, "B": 2 * seconds, "I": seconds, "W": seconds}
    return kinds | {(0, "I"): 0, (0, "W"): 2 * seconds}


def arguments(stages, microbatches):
    """(params, batch): for each stage a weight and a bias, and a row for each microbatch."""
    params = [(np.full(WIDTH, 1 + s / 100, "f"), np.full(WIDTH, 0.1, "f")) for s in range(stages)]
    return params, np.random.default_rng(0).normal(size=(microbatches, WIDTH)).astype("f")


def loss(seconds):
    """The loss, an `objective.Mean`, of a chain of stages, each of which sleeps."""
    layer = _layer(seconds)

    def total_and_count(params, batch):
        x = batch
        for s, (weight, bias) in enumerate(params):
            x = layer(weight, (marks.stage_boundary(x) if s else x) + bias)
        return objective.Mean(x.sum(), jnp.float32(x.shape[0]))

    return total_and_count


def mean(params, batch):
    """The same on one device, awake."""
    for weight, bias in params:
        batch = weight * (batch + bias)
    return batch.sum() / batch.shape[0]


def _layer(seconds):
    """weight * x, which sleeps once forward and once for each half of its backward.

    Each half has a callback of its own, so that slicing finds one on the way to the input and one
    on the way to the weights. The second waits for the first: neighbours in one program might
    sleep at the same time.
    """

    def sleep(_):
        time.sleep(seconds)
        return np.float32(0)

    def after(x):
        """0, after a sleep that starts when x is there."""
        if not seconds:
            return jnp.float32(0)
        return jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), x.ravel()[0])

    @jax.custom_vjp
    def layer(weight, x):
        return weight * x + after(x)

    def backward(kept, cotangent):
        weight, x = kept
        to_input = weight * cotangent + after(cotangent)
        return (x * cotangent + after(to_input)).sum(0), to_input

    layer.defvjp(lambda weight, x: (layer(weight, x), (weight, x)), backward)
    return layer


class Alone:
    """Seconds of each (stage, kind), run with nothing else going on: medians over rounds.

    `programs` has the program, waited for; `tasks` that and handing its result to the neighbour.
    """

    def __init__(self, plan, params, kinds):
        self._steps, self._seconds = {}, collections.defaultdict(list)
        for s, stage in enumerate(plan.stages):
            own = [params.tree[piece.path][s] for piece in plan.layout[s]]
            self._steps |= _steps(plan, s, stage, own, kinds)

    def round(self):
        for key, step in self._steps.items():
            self._seconds[key].append(step())

    @property
    def programs(self):
        return {key: float(np.median([a for a, _ in x])) for key, x in self._seconds.items()}

    @property
    def tasks(self):
        return {key: float(np.median([b for _, b in x])) for key, x in self._seconds.items()}


def _steps(plan, s, stage, own, kinds):
    """{(s, kind): function that runs it once, and returns (seconds, seconds with sending)}."""
    data, carry = (_zeros(stage.mesh, x) for x in (stage.stage.inputs, stage.stage.carry))
    outputs, kept, _ = stage.kinds["F"](own, data, carry)
    cots = [outputs[i] for i in cut.differentiable(stage.stage)]
    pending = stage.kinds["I"](own, data, kept, cots)[1] if "I" in kinds else None
    sums = [stage.zeros()]

    def adding(kind, *values):  # these donate the sums that they are given
        out = stage.kinds[kind](own, data, kept, *values, sums[0])
        sums[0] = out[-2]  # before the number that tells that it has run
        return out

    calls = {
        "F": lambda: stage.kinds["F"](own, data, carry),
        "B": lambda: adding("B", cots),
        "I": lambda: stage.kinds["I"](own, data, kept, cots),
        "W": lambda: adding("W", pending),
    }
    following = plan.stages[s + 1].laid["carry"] if s + 1 < len(plan.stages) else []
    before = plan.stages[s - 1].laid["cotangents"] if s else []
    receivers = {"F": following, "B": before, "I": before, "W": []}

    def step(kind):
        start = time.perf_counter()
        result = jax.block_until_ready(calls[kind]())
        done = time.perf_counter() - start
        for x, sharding in zip(result[0], receivers[kind], strict=False):
            jax.device_put(x, sharding)
        return done, time.perf_counter() - start

    return {(s, kind): functools.partial(step, kind) for kind in kinds}


def _zeros(mesh, shapes):
    whole = NamedSharding(mesh, P())
    return [jax.device_put(np.zeros(x.shape, x.dtype), whole) for x in shapes]


def parts(devices, repeats=20):
    """{part of the executor: microseconds}, each right after `SECONDS` of sleep, as in a run.

    What a processor has not run for 20 ms it has no longer in its caches: the same calls one
    after another, with no sleep between, take a third of these or less.
    """
    near, far = (NamedSharding(jax.sharding.Mesh([d], "x"), P()) for d in devices[:2])
    x, row = jax.device_put(np.ones((1, WIDTH), "f"), near), np.ones((2, WIDTH), "f")
    empty = jax.jit(lambda x: x + 1, out_shardings=near)
    layer = _layer(1e-9)
    calling = jax.jit(lambda x: layer(x, x), out_shardings=near)
    calls = {
        "sleep, beyond its 20 ms": lambda: time.sleep(SECONDS),
        "program dispatched and waited for": lambda: jax.block_until_ready(empty(x)),
        "program that calls Python back": lambda: jax.block_until_ready(calling(x)),
        "device_put to the next rank": lambda: jax.block_until_ready(jax.device_put(x, far)),
        "a microbatch cut and put": lambda: jax.block_until_ready(jax.device_put(row[:1], near)),
    }
    found = {}
    for name, call in calls.items():
        call()
        found[name] = np.median([_after_sleep(call) for _ in range(repeats)])
    found["sleep, beyond its 20 ms"] -= SECONDS
    found["waking a rank, 1 waiting"] = _waking(1, repeats)
    found["waking a rank, 7 waiting"] = _waking(7, repeats)
    return {name: 1e6 * seconds for name, seconds in found.items()}


def _after_sleep(call):
    time.sleep(SECONDS)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _waking(waiting, repeats):
    """Seconds from `notify_all` to the first line that a waiting thread runs: of all, the median.

    The others find that it was not for them, and wait again; they all take the one lock.
    """
    changed, told, delays = threading.Condition(), [], []

    def wait():
        for n in range(repeats):
            with changed:
                changed.wait_for(lambda n=n: len(told) > n)
                delays.append(time.perf_counter() - told[n])

    threads = [threading.Thread(target=wait) for _ in range(waiting)]
    for thread in threads:
        thread.start()
    for _ in range(repeats):
        time.sleep(SECONDS)
        with changed:
            told.append(time.perf_counter())
            changed.notify_all()
    for thread in threads:
        thread.join()
    return np.median(delays)
