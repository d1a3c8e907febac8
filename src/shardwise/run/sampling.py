"""Text from a decoder, a token at a time, each from the whole of what stands before it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardwise.model import Config, Decoder


@functools.lru_cache(maxsize=8)
def _writer(config, prompt, length, temperature):
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[0]

    @jax.jit
    def run(params, tokens, key):
        decoder = nnx.merge(graphdef, params)

        def one(i, tokens):
            # Causal: what stands to the right of the last token changes nothing.
            logits = decoder(tokens[None])[0, i - 1]
            if temperature == 0:
                chosen = jnp.argmax(logits)
            else:
                chosen = jax.random.categorical(jax.random.fold_in(key, i), logits / temperature)
            return tokens.at[i].set(chosen.astype(tokens.dtype))

        return jax.lax.fori_loop(prompt, length, one, tokens)

    return run


def write(
    config: Config,
    params: Any,
    prompt: np.ndarray,
    count: int,
    key: jax.Array,
    temperature: float = 0.8,
) -> np.ndarray:
    """The `prompt`, int [tokens], and `count` tokens more, drawn at a temperature (0: likeliest).

    `params` is a `Decoder`'s state, laid out in any way that a compiler can read.

    Raises:
      ValueError: an empty prompt, or one with tokens outside the vocabulary.
    """
    if not 0 < len(prompt) or not 0 <= min(prompt) <= max(prompt) < config.vocab:
        raise ValueError(
            f"run: the prompt has {len(prompt)} tokens; expected one or more, each below the "
            f"vocabulary of {config.vocab}."
        )
    # One row at a time has no others to compete with for an expert's slots.
    config = dataclasses.replace(config, capacity_factor=None, dropout=0.0, stages=1)
    length = len(prompt) + count
    tokens = np.zeros(length, np.int32)
    tokens[: len(prompt)] = prompt
    return np.asarray(_writer(config, len(prompt), length, temperature)(params, tokens, key))


def text(tokens: np.ndarray) -> str:
    """The text of tokens that are bytes."""
    return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")
