"""A model of your own with the flags and promises of `shardwise train`: a recurrent network.

`python examples/own_model.py --help`, `--resume`, or in several processes:
`shardwise launch local --processes 4 -- examples/own_model.py`. With `flops=` of a step given to
`run.train`, metrics have the MFU, where it knows the chip.
"""

import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwise import run


def create(key):  # one device's parameters: a recurrent network's
    draw = jax.random.normal(key, (66, 64)) / 8
    return {"into": draw[:1], "again": draw[1:65], "out": draw[65:].T}


def loss(params, batch):  # one device's, a mean over rows: guess the next value of a wave
    def cell(state, x):
        state = jnp.tanh(x[:, None] * params["into"] + state @ params["again"])
        return state, (state @ params["out"])[:, 0]

    wave = batch["wave"].T
    guess = jax.lax.scan(cell, jnp.zeros((wave.shape[1], 64)), wave[:-1])[1]
    return jnp.mean((guess - wave[1:]) ** 2)


def wave(row):  # row 7 of the data is the same wave whenever, and on whichever process, it is read
    pace = np.random.default_rng(row).uniform(0.1, 1)
    return {"wave": np.sin(pace * np.arange(32.0))}


rows = grain.MapDataset.range(10**9).map(wave)
settings = run.flags(run.Settings(run="runs/mine", steps=200, layout=run.Roles(data=2, fsdp=4)))
run.join(settings.processes, settings.devices)
sys.exit(run.leave(run.train(settings, create, loss, rows, optax.adam(1e-2))))
