"""Rules by a leaf's path: patterns, and any function."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from shardwise.rules.leaves import Leaf, read
from shardwise.rules.rule import Choice, Rule


class PathRules(Rule):
    """Pairs of a regular expression and a PartitionSpec: the first that is found in a path counts.

    With `strict` every leaf of more than one element must match and every pattern be used;
    otherwise unmatched leaves are replicated.

    Raises:
      ValueError: a pair that is not a pattern and a spec; when called, all unmatched paths or
        unused patterns, and what `Rule` lists.
    """

    def __init__(
        self, *pairs: tuple[str, PartitionSpec], strict: bool = True, uneven: str = "error"
    ):
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)) or (
                not isinstance(pair[1], PartitionSpec)
            ):
                raise ValueError(
                    f"PathRules: {pair!r}; expected pairs of a regular expression and a "
                    f"PartitionSpec, such as ('mlp/.*kernel', P('fsdp'))."
                )
        self.pairs = [(re.compile(pattern), spec) for pattern, spec in pairs]
        self.strict, self.uneven = strict, uneven
        self.check_uneven()

    def choices(self, tree: Any, mesh: Mesh) -> list[Choice]:
        if self.strict:
            self._check_complete([leaf.path for leaf in read(tree) if leaf.size != 1])
        return super().choices(tree, mesh)

    def choose(self, leaf: Leaf, mesh: Mesh) -> Choice:
        for pattern, spec in self.pairs:
            if pattern.search(leaf.path):
                return Choice(spec, f"{pattern.pattern!r} says so")
        return Choice(PartitionSpec(), "no pattern matches")

    def _check_complete(self, paths):
        hits = {path: [p for p, _ in self.pairs if p.search(path)][:1] for path in paths}
        if unmatched := [path for path, hit in hits.items() if not hit]:
            raise ValueError(
                f"PathRules: no pattern matches {', '.join(unmatched)}. Add one, such as "
                f"('.*', P()) at the end, or pass strict=False to replicate them."
            )
        used = {p.pattern for hit in hits.values() for p in hit}
        if unused := [p.pattern for p, _ in self.pairs if p.pattern not in used]:
            raise ValueError(
                f"PathRules: no leaf takes the pattern {unused[0]!r}: none matches, or earlier "
                f"patterns took them all. Correct or remove it, or pass strict=False. Paths are "
                f"{', '.join(paths)}."
            )


@dataclasses.dataclass(frozen=True)
class PolicyRule(Rule):
    """A rule by `fn(path, leaf) -> PartitionSpec`, for each array of more than one element.

    Raises, when called:
      TypeError: `fn` returned something else.
    """

    fn: Callable
    uneven: str = "error"

    def __post_init__(self):
        self.check_uneven()

    def choose(self, leaf: Leaf, mesh: Mesh) -> Choice:
        spec = self.fn(leaf.path, leaf.array)
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"PolicyRule: for {leaf.label} the function returned {spec!r}; expected a "
                f"PartitionSpec, P() for a replicated array."
            )
        return Choice(spec, "the policy says so")
