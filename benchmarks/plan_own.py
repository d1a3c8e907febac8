"""`plan.own`'s estimate of memory, which knows nothing of the decoder, beside the TPU compiler's.

`python benchmarks/plan_own.py` takes what `benchmarks/plan.py` has recorded of layouts of data and
fsdp, and traces the same losses as if they were anybody's: some 10 s each, nothing is compiled for
TPUs.
"""

import plan
import plan_cases

from shardwise import mesh, topology, train
from shardwise.plan import Own, programs
from shardwise.plan.own import candidate


def estimated(case: plan_cases.Case) -> float:
    """Bytes on a device."""
    program = programs.program(case.roles, case.config, case.batch, case.sequence)
    told = program.create, program.loss, train.optimizer(), program.batch, program.has_aux
    job = Own(*told, {"dtype": case.config.dtype})
    return candidate(job, case.roles, topology.chips(case.chips)).memory.total


def main() -> None:
    mesh.look_for_no_tpu()
    record, off = plan.recorded(), []
    for name, case in plan_cases.JUDGED.items():
        if name in record and set(case.roles.sizes) <= {"data", "fsdp"}:
            off.append(estimated(case) / record[name]["needed"] - 1)
            print(f"{name:28} {off[-1]:+.1%}", flush=True)
    near = sum(abs(x) <= 0.15 for x in off)
    print(f"{near} of {len(off)} within 15 %; from {min(off):+.0%} to {max(off):+.0%}.")


if __name__ == "__main__":
    main()
