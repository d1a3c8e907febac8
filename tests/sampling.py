"""Cases of which `make test` runs some, `make test-all` a sample by a seed, `make stacks` all."""

import os
import random

import pytest

IN_FULL = bool(os.environ.get("IN_FULL"))  # which `make stacks` sets
SEED = 20261125


def sample(cases, many):
    """So many of the cases, drawn by the seed; all with IN_FULL."""
    cases = list(cases)
    return cases if IN_FULL else random.Random(SEED).sample(cases, many)


def marked(cases, quick, many=None, always=()):
    """The cases, slow but for the quick ones; of the slow ones a sample of so many, if told, beside
    those that are never left out.
    """
    others = [case for case in cases if case not in quick and case not in always]
    chosen = [*always, *(others if many is None else sample(others, many))]
    slow = [pytest.param(*_values(c), marks=pytest.mark.slow) for c in chosen]
    return [*(c for c in cases if c in quick), *slow]


def _values(case):
    return case if isinstance(case, tuple) else (case,)
