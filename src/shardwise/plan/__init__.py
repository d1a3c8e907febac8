"""The planner of layouts: every one there is for a model and chips, by formula, the best first.

For a published decoder, or a program of your own over data and fsdp:

    found = plan.plan("llama3-8b", "v5p:4x4x8", batch=1024, sequence=8192)
    found.best[0].roles, found.best[0].memory, found.best[0].step, found.best[0].mfu
    found.why_not                               # what cannot be, and what does not fit

    found = plan.own(create, loss, tx, "v5e:4x4", batch)
    print(plan.text(found, top=5))
"""

from shardwise.costs.arrays import Roles
from shardwise.plan.own import own
from shardwise.plan.planning import Candidate, Plan, plan
from shardwise.plan.published import preset
from shardwise.plan.runs import RUNS
from shardwise.plan.seconds import model_flops
from shardwise.plan.tables import text

__all__ = [
    "RUNS", "Candidate", "Plan", "Roles", "model_flops", "own", "plan", "preset", "text",
]  # fmt: skip
