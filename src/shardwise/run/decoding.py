"""The programs `shardwise train` and `shardwise sample`: the decoder on what settings name."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardwise import checkpoint, layouts, mesh, model, plan
from shardwise.model import Config, Decoder
from shardwise.run import keys, sampling, state, text
from shardwise.run.folder import Folder
from shardwise.run.loop import Result
from shardwise.run.settings import Settings
from shardwise.run.stored import from_flat
from shardwise.run.training import train as train_loop
from shardwise.run.transformations import correction, wide

PROMPT = "def "


def run(settings: Settings) -> Result:
    """Train the decoder; see `shardwise.run.train`.

    Raises:
      ValueError: a token that the vocabulary lacks, and what `train` raises.
    """
    config = of(settings)
    if (most := text.vocabulary(settings.data)) > config.vocab:
        raise ValueError(
            f"run: the data has a token {most - 1}, and model.vocab is {config.vocab}; say "
            f"--model.vocab {most}."
        )
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[0]
    loss = model.routed_loss if config.experts else model.loss
    options: dict[str, Any] = {}
    if settings.data.tokens is None and settings.evaluation.sample:
        options["sample"] = functools.partial(_sample, config, settings)
    return train_loop(
        settings,
        create=functools.partial(_create, config),
        loss=functools.partial(loss, graphdef=graphdef),
        batches=text.rows(settings.data, settings.sequence, settings.seed),
        validation=text.rows(settings.data, settings.sequence, settings.seed, "validation"),
        has_aux=bool(config.experts),
        facts={"data": text.fingerprint(settings.data), "program": "shardwise train"},
        flops=plan.model_flops(config, settings.batch, settings.sequence),
        **options,
    )


def of(settings: Settings) -> Config:
    """The decoder's sizes, with a stage boundary for each stage of the layout."""
    stages = max(settings.layout.stage, settings.model.stages)
    return dataclasses.replace(settings.model, stages=stages)


def _create(config, key):
    return nnx.state(Decoder(config, nnx.Rngs(params=key)))


def _sample(config, settings, params):
    params = jax.tree.map(jnp.asarray, params)
    prompt = np.frombuffer(PROMPT.encode(), np.uint8)
    key = keys.stream(jax.random.key(settings.seed), "samples")
    return sampling.text(sampling.write(config, params, prompt, settings.evaluation.sample, key))


def sample(
    path: Path,
    prompt: str = PROMPT,
    count: int = 400,
    temperature: float = 0.8,
    seed: int = 0,
    mean: bool = False,
    step: int | None = None,
) -> str:
    """A text from a run's checkpoint, by its parameters or by their mean, over all devices here.

    Raises:
      FileNotFoundError: no such run, or nothing saved in it.
      ValueError: a run of tokens, which are no text.
    """
    folder = Folder(path)
    saved = folder.settings()
    if saved is None:
        raise FileNotFoundError(f"run: {folder.path} is no run folder: it has no settings.json.")
    facts = (state.saved(folder) or {}).get("facts", {})
    if facts and "program" not in facts:
        raise ValueError(f"run: {folder.path} trained a model of its own, and no decoder of text.")
    settings = from_flat(saved)
    if settings.data.tokens is not None:
        raise ValueError("run: this run has token numbers, and no text to write.")
    config = of(settings)
    params = _restored(folder, config, settings, mean, step)
    tokens = np.frombuffer(prompt.encode(), np.uint8)
    key = keys.stream(jax.random.key(seed), "samples")
    return sampling.text(sampling.write(config, params, tokens, count, key, temperature))


def _restored(folder, config, settings, mean, step):
    """The parameters of a checkpoint, cut over the devices where they divide."""
    shapes = jax.eval_shape(functools.partial(_create, config), jax.random.key(0))
    layout = layouts.Layout(mesh.make(fsdp=-1), fsdp="fsdp")
    target = jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
        shapes,
        layouts.shardings(layout, shapes),
    )
    if not mean:
        return checkpoint.restore(folder.checkpoints, {"params": target}, step)["params"]
    if settings.ema is None:
        raise ValueError("run: this run kept no mean of its parameters (ema=None).")
    sums = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, wide(x.dtype), sharding=x.sharding), target
    )
    part = {"inner": {"sum": sums, "count": jax.ShapeDtypeStruct((), jnp.int32)}}
    found = checkpoint.restore(folder.checkpoints, {"opt_state": part}, step, partial=True)
    found = found["opt_state"]["inner"]
    by = correction(settings.ema, int(found["count"]))
    return jax.tree.map(lambda x, like: (x / by).astype(like.dtype), found["sum"], target)
