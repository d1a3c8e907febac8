"""The commands `shardwise train` and `sample`: the decoder, on the data that settings name."""

import dataclasses
import functools
import glob
import shlex
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

from shardwise import checkpoint, data, layouts, mesh, model, plan
from shardwise.model import Config, Decoder
from shardwise.run import signals, state, training
from shardwise.run.folder import Folder
from shardwise.run.optimizers import averaged, guarded
from shardwise.run.reports import say
from shardwise.run.settings import Data, Settings, flags, from_flat
from shardwise.run.state import Result

PROMPT = "def "


def command(argv: Sequence[str]) -> int:
    """Train; the exit status is 0 when done, 75 when a signal stopped the run after saving."""
    given = flags(argv=argv, prog="shardwise train")
    signals.join(given.processes, given.devices)
    layout, main = given.layout.layout(), jax.process_index() == 0
    if main:
        kind = mesh.devices()[0].device_kind
        say(f"On {len(mesh.devices())} devices, {kind}. {layout}")
    result = train(given)
    if main:
        more = "" if result.stopped else f" --steps {2 * given.steps}"
        plot, run = given.run / "metrics.png", shlex.quote(str(given.run))
        look = f"Look:   {plot}" if plot.exists() else "No plot: pip install matplotlib draws one."
        go_on = f"Go on:  shardwise train --run {run} --resume{more}"
        say(f"{look}\n{go_on}\nWrite:  shardwise sample {run}")
    return signals.leave(result)


def train(settings: Settings) -> Result:
    """Train the decoder; see `shardwise.run.train`."""
    config = config_of(settings)
    if (most := vocabulary(settings.data)) > config.vocab:
        raise ValueError(
            f"run: the data has a token {most - 1}, and model.vocab is {config.vocab}; say "
            f"--model.vocab {most}."
        )
    create, loss, has_aux = model.program(config)

    def rows(split, seed):
        read = documents(settings.data, split)
        return data.rows(read, settings.sequence, seed, settings.data.packed)

    def written(params):
        params = jax.tree.map(jnp.asarray, params)
        return write(config, params, PROMPT, settings.evaluation.sample, settings.seed)

    is_text = settings.data.tokens is None
    return training.train(
        settings,
        create=create,
        loss=loss,
        batches=rows("train", settings.seed),
        validation=rows("validation", None),  # never shuffled
        has_aux=has_aux,
        facts={"data": fingerprint(settings.data), "program": "shardwise train"},
        flops=plan.model_flops(config, settings.batch, settings.sequence),
        sample=written if is_text and settings.evaluation.sample else None,
    )


def config_of(settings: Settings) -> Config:
    """The decoder's sizes, with a stage boundary for each stage of a layout that is not exact."""
    asked = 1 if settings.layout.exact else settings.layout.stage
    return dataclasses.replace(settings.model, stages=max(asked, settings.model.stages))


def documents(source: Data, split: str = "train") -> tuple[np.ndarray, ...]:
    """The documents of a split: nine files in ten train; of one alone, the first nine tenths."""
    if source.text is not None and source.tokens is not None:
        raise ValueError("run: give data.text or data.tokens, and not both.")
    if source.tokens is not None:
        return (data.share(_tokens(source.tokens), split),)
    return data.corpus(split) if source.text is None else _files(source.text, split)


def fingerprint(source: Data) -> int:
    """A checksum of what a run is trained on."""
    if source.tokens is None:
        return data.checksum(documents(source))
    array = _tokens(source.tokens)
    ends = np.concatenate([array[: 2**18], array[-(2**18) :]])
    return zlib.crc32(np.ascontiguousarray(ends).tobytes(), array.size % 2**32)


def vocabulary(source: Data) -> int:
    """The size of the vocabulary: one more than the largest token."""
    return data.VOCAB if source.tokens is None else 1 + int(_tokens(source.tokens).max())


def _tokens(file):
    if not Path(file).is_file():
        raise FileNotFoundError(f"run: no file {file}; data.tokens names a .npy of token numbers.")
    array = np.load(file, mmap_mode="r")
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.size < 20:
        raise ValueError(
            f"run: {file} is {array.dtype}{list(array.shape)}; expected token numbers in one "
            f"dimension, 20 at least."
        )
    return array


def _files(text, split):
    path = Path(text).expanduser()
    found = [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else []
    found = found or [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    files = [file for file in found if file.is_file() and file.stat().st_size > 1]
    if not files:
        raise FileNotFoundError(
            f"run: no files at {text}; data.text names a folder, a file, or a glob in quotes."
        )
    return data.documents(files, [file.name for file in files], split)


def sample(
    run: tyro.conf.Positional[Path],
    prompt: str = PROMPT,
    tokens: int = 400,
    temperature: float = 0.8,
    seed: int = 0,
    mean: bool = False,
    step: int | None = None,
    devices: int = 1,
) -> None:
    """Write text from a run's checkpoint.

    Args:
      run: the run folder.
      prompt: what the text begins with.
      tokens: how many are written.
      temperature: of the draws; 0 takes the likeliest.
      seed: of the draws.
      mean: whether the mean of the parameters writes (EMA), or they themselves.
      step: which checkpoint; by default the newest.
      devices: over how many the parameters are cut, simulated where there are fewer.
    """
    mesh.simulate(devices)
    folder = Folder(run)
    saved = folder.settings()
    if saved is None:
        raise FileNotFoundError(f"run: {folder.path} is no run folder: it has no settings.json.")
    if "model.embed" not in saved:
        raise ValueError(f"run: {folder.path} trained a model of its own, and no decoder of text.")
    settings = from_flat(saved)
    if settings.data.tokens is not None:
        raise ValueError("run: this run has token numbers, and no text to write.")
    config = config_of(settings)
    params = _restored(folder, config, settings, mean, step)
    print(write(config, params, prompt, tokens, seed, temperature))


def _restored(folder, config, settings, mean, step):
    """The parameters of a checkpoint, or their mean, cut over the devices where they divide."""
    if mean and settings.ema is None:
        raise ValueError("run: this run kept no mean of its parameters (ema=None).")
    layout = layouts.Layout(mesh.make(fsdp=-1), fsdp="fsdp")
    tx = guarded(averaged(optax.identity(), settings.ema) if mean else optax.identity())
    params, opt_state = state.abstract(layout, model.program(config)[0], tx, settings.seed)
    # Of the optimizer's own state nothing is read.
    like = {"opt_state": opt_state} if mean else {"params": params}
    found = checkpoint.restore(folder.checkpoints, like, step, partial=mean)
    return state.mean(params, found["opt_state"], settings.ema) if mean else found["params"]


def write(
    config: Config, params: Any, prompt: str, count: int, seed: int, temperature: float = 0.8
) -> str:
    """The `prompt` and `count` bytes more, each drawn from the whole of what stands before it, by a
    `Decoder`'s state in any layout; a temperature of 0 takes the likeliest.
    """
    given = prompt.encode()
    if not given or max(given) >= config.vocab:
        raise ValueError(
            f"run: the prompt has {len(given)} bytes; expected one or more, each below the "
            f"vocabulary of {config.vocab}."
        )
    # One row at a time has no others to compete with for an expert's slots.
    config = dataclasses.replace(config, capacity_factor=None, dropout=0.0, stages=1)
    key = state.stream(jax.random.key(seed), "samples")
    tokens = np.zeros(len(given) + count, np.int32)
    tokens[: len(given)] = list(given)
    tokens = _written(params, tokens, key, config, len(given), temperature)
    return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")


@functools.partial(jax.jit, static_argnames=("config", "start", "temperature"))
def _written(params, tokens, key, config, start, temperature):
    abstract = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
    decoder = nnx.merge(nnx.graphdef(abstract), params)

    def one(i, tokens):
        # Causal: what stands to the right of the last token changes nothing.
        logits = decoder(tokens[None])[0, i - 1]
        if temperature == 0:
            chosen = jnp.argmax(logits)
        else:
            chosen = jax.random.categorical(jax.random.fold_in(key, i), logits / temperature)
        return tokens.at[i].set(chosen.astype(tokens.dtype))

    return jax.lax.fori_loop(start, len(tokens), one, tokens)
