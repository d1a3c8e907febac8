"""Custom calls of lowered programs: each is known to keep to its own device, or refused."""

import re

# By what a call is for: libraries, TPU's own algorithms, placement, Python on the host, kernels.
_LOCAL = re.compile(
    r"""(lapack|cublas|cusolver|cusparse|hipblas|hipsolver|hipsparse|rocsolver|cu|hip)_\w+
    | Cholesky | Eigh | Qr | LuDecomposition | ProductOfElementaryHouseholderReflectors
    | ApproxTopK | PartialReduce | TopK | mhlo\.\w+ | chlo\.\w+ | stablehlo\.dynamic_\w+
    | __cudnn\$\w+ | __op\$block_scaled_dot
    | Sharding | SPMDFullToShardShape | SPMDShardToFullShape | LayoutConstraint | xla\.sdy\.\w+
    | annotate_device_placement | AllocateBuffer | CreateBuffer | Pin | Unpin | shape_assertion
    | xla_(\w+_)?python_(cpu|gpu|tpu)_callback
    | __gpu\$xla\.gpu\.triton | triton_kernel_call(_ffi)? | tpu_custom_call""",
    re.VERBOSE,
)


def opcode(op) -> str:
    """HLO's name for the operation of a `stablehlo.custom_call`: "custom-call" if it sends nothing.

    Raises:
      ValueError: whether it sends is not known.
    """
    target = op.attributes["call_target_name"].value
    if target == "ragged_all_to_all":
        return "ragged-all-to-all"
    config = str(op.attributes["backend_config"]) if "backend_config" in op.attributes else ""
    # A TPU kernel says so, and only then, if it copies to other devices.
    if not _LOCAL.fullmatch(target) or "has_communication" in config:
        raise ValueError(
            f"measure: whether the custom call {target} sends anything to other devices is not "
            f"known here; measure the parts of the program around it by themselves."
        )
    return "custom-call"
