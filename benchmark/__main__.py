"""All operations in one run: `python -m benchmark [rms_norm rotary ...] --budget-s 240`, about four minutes on an H200.

Whole training steps: benchmark_qwen3.py and benchmark_fsdp.py. Tables and plots from the results: tables.py and plots.py.
"""

from .benchmark_add_rms_norm import ADD_RMS_NORM
from .benchmark_linear_cross_entropy import LINEAR_CROSS_ENTROPY
from .benchmark_qk_norm_rotary import QK_NORM_ROTARY
from .benchmark_rms_norm import Q_NORM, RMS_NORM, host_cost
from .benchmark_rotary import ROTARY
from .benchmark_swiglu import SWIGLU
from .harness import parser, run

OPERATIONS = {o.name: o for o in (RMS_NORM, Q_NORM, QK_NORM_ROTARY, ROTARY, ADD_RMS_NORM, SWIGLU, LINEAR_CROSS_ENTROPY)}


def main(arguments=None) -> list:
    p = parser(__doc__.partition("\n")[0])
    p.add_argument("operations", nargs="*", metavar="operation", help=f"all of {', '.join(OPERATIONS)}")
    p.set_defaults(tokens=(1024, 4096, 8192, 16384))
    args = p.parse_args(arguments)
    unknown = set(args.operations) - set(OPERATIONS)
    if unknown:
        p.error(f"operation is {', '.join(unknown)}, expected some of {', '.join(OPERATIONS)}")
    return run([OPERATIONS[name] for name in args.operations or OPERATIONS], args, (host_cost,))


if __name__ == "__main__":
    main()
