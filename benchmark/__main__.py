"""Measure all operations of Qwen3 in one run: `python -m benchmark [rms_norm rotary ...] --budget-s 240`, about four minutes on an H200.

Operations of other suites take part when they are named. Whole training steps: steps.py and benchmark_fsdp.py; tables and plots from
the results: tables.py and plots.py.
"""

from . import registry
from .command_line import operation_parser
from .harness import run
from .operation import TOKENS
from .suites import QWEN3


def main(arguments=None) -> list:
    operations = registry.operations()
    p = operation_parser(__doc__.partition("\n")[0], *operations.values())
    p.add_argument("operations", nargs="*", metavar="operation", help=f"of {', '.join(operations)}; without any, all of Qwen3's")
    p.set_defaults(tokens=TOKENS)
    args = p.parse_args(arguments)
    unknown = set(args.operations) - set(operations)
    if unknown:
        p.error(f"operation is {', '.join(sorted(unknown))}, expected some of {', '.join(operations)}")
    return run([operations[name] for name in args.operations] or registry.of_suite(QWEN3), args)


if __name__ == "__main__":
    main()
