"""RMSNorm of the hidden states and of queries; and what one eager call costs the host."""

from dataclasses import replace

import torch.nn.functional as F

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = Path(__file__).resolve().parent.name

from . import eager, models, providers
from .harness import Case, Inputs, Operation, OperationBenchmark, Random, main, message, passes, save, say


def norm_inputs(*shape: int, random: Random) -> Inputs:
    return Inputs(
        leaves=(random.normal(*shape), random.normal(shape[-1], scale=0.1, shift=1.0)),
        gradients=(random.normal(*shape),),
    )


def of_liger():
    function = providers.liger("ops.rms_norm", "LigerRMSNormFunction")
    return lambda x, weight: function.apply(x, weight, eager.EPS)


def of_liger_cutedsl():
    function = providers.liger_cutedsl("rms_norm")
    return lambda x, weight: function(x, weight, eager.EPS)


def of_liger_cutile():
    function = providers.liger_cutile("LigerRMSNormFunction")
    return lambda x, weight: function.apply(x, weight, eager.EPS)


def of_torch():
    return lambda x, weight: F.rms_norm(x, weight.shape, weight, eager.EPS)


def ours(kernel):
    function = providers.operation(kernel, "rms_norm")
    return lambda x, weight: function(x, weight, eager.EPS)


RMS_NORM = Operation(
    name="rms_norm",
    title="RMSNorm",
    outputs=("y",),
    gradients=("dx", "dweight"),
    inputs=lambda size, tokens, random: norm_inputs(1, tokens, size.hidden, random=random),
    formula=eager.rms_norm,
    ours=ours,
    loaders={"torch": of_torch, "liger": of_liger, "liger_cutedsl": of_liger_cutedsl, "liger_cutile": of_liger_cutile},
    work=passes(2, 3, of=lambda inputs: inputs.leaves[0].nbytes),  # x, y; dy, x, dx
)
Q_NORM = replace(
    RMS_NORM,
    name="q_norm",
    title="RMSNorm of the queries' heads",
    inputs=lambda size, tokens, random: norm_inputs(1, tokens, size.heads, size.head_dim, random=random),
    file="rms_norm",
)


def host_cost(operation, settings, args) -> list:
    """Rows for the host's microseconds in one eager call, on a tensor so small that the device always waits."""
    if operation is not RMS_NORM:
        return []
    case = Case(operation, models.full_name(args.model), 128, False)
    inputs, rows = case.inputs(settings), []
    for provider in ("torch", "huggingface", "liger", "bastile"):
        if provider not in settings.providers:
            continue
        for mode, working in (("forward", inputs.copy()), ("no_grad_forward", inputs)):
            try:
                function = operation.load(provider)
                found = settings.clock.host_microseconds(lambda f=function, w=working: f(*w.leaves))
            except (providers.NotInstalled, ModuleNotFoundError):
                continue
            except Exception as error:
                found = error.with_traceback(None)
            rows.append(case.row(settings, provider, mode, "host_time", "us", found))
            text = message(found) if isinstance(found, Exception) else f"{found:.1f} us a call"
            say(f"  host, {mode:<16}{provider:<16}{text}")
    save(operation, settings, rows)
    return rows


class RMSNormBenchmark(OperationBenchmark):
    operation = RMS_NORM


if __name__ == "__main__":
    main(RMS_NORM, Q_NORM, extras=(host_cost,))
