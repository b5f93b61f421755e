"""Whole training steps on one GPU: random weights, batch 1, bf16, fused AdamW, no checkpointing; or a packed or padded batch.

    python -m benchmark.steps [--model qwen3_0.6b] [--tokens 4096,8192]
    python -m benchmark.steps --model gpt_oss_20b [--layers 24]
    python -m benchmark.steps --model qwen3_moe_30b_a3b [--layers 12]
    python -m benchmark.steps --autocast [--weights fp32] [--lora 16]
    python -m benchmark.steps --layers 12 --tokens 8192 --documents 8
    python -m benchmark.steps --layers 12 --tokens 8192 --rows 4 --padding 0.2
    python -m benchmark.steps --model qwen3_moe_30b_a3b --routing skewed
    python -m benchmark.steps --checkpointing --tokens 8192
    python -m benchmark.steps --loss dpo --lora 16 --layers 12 --tokens 8192
    python -m benchmark.steps --model mistral_7b --tokens 8192 --parts

One process a provider, in turns: a new one each time. Sequences get longer until they do not fit.
"""

import argparse
import dataclasses
import time
from pathlib import Path

if not __package__:  # a measuring process runs this as a file
    import sys

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
    __package__ = Path(__file__).absolute().parent.name

from . import compiled_peer, families, models, nf4, routing, unsloth_peer
from .command_line import default_device, integers, new_parser, results_folder, some_of
from .families import Family
from .processes import Group
from .providers import EIGHT_BITS, in_order, is_ours, package
from .report import log
from .step_results import Results
from .stepping import Form, Recipe, Stepper, child
from .trl_losses import LOSSES, ROWS

CAPTURED = ("bastile_captured", "bastile_fp8_captured")
# What is done to the frozen weights below adapters.
FROZEN = {"bastile_fp8_frozen": ("eight_bits",), "bastile_four_bits": ("four_bits", "eight_bits", "host_embeddings")}
OF_THE_PARENT = ("providers", "rounds", "fresh", "budget_s", "results")  # options that a measuring process has no use for
BEFORE_TRANSFORMERS = ("unsloth",)  # what must be imported first
TRL_PROVIDERS = ("huggingface", "liger", "bastile_trl_head", "bastile")  # of a loss of TRL, unless told otherwise


def known_providers() -> tuple[str, ...]:
    """Return those of any family."""
    return tuple(dict.fromkeys(name for family in families.FAMILIES.values() for name in family.providers))


def parser(description: str, tokens: tuple[int, ...] | None = None, known: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    """Return the command line of training steps. tokens: the lengths unless told otherwise, None for those of the model's family. known:
    providers, () for those of any family."""
    p, known = new_parser(description), known or known_providers()
    p.add_argument("--model", default="8b", help=f"sizes: {', '.join(families.measured())}")
    p.add_argument("--layers", type=int, help="fewer layers than the model has")
    p.add_argument("--tokens", type=integers, default=tokens, help="lengths of the sequence, comma-separated")
    p.add_argument("--providers", type=some_of(*known), help=f"of {', '.join(known)}")
    p.add_argument("--documents", type=int, default=1, help="so many documents, packed into one row")
    p.add_argument("--rows", type=int, default=1, help="so many rows, which the tokens are spread over")
    p.add_argument("--padding", type=float, default=0.0, help="the share of the rows that is padding")
    p.add_argument("--warmup", type=int, default=3, help="steps before the timed ones, at every length")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--rounds", type=int, default=1, help="turns that the providers take, each in a new process")
    p.add_argument("--fresh", action="store_true", help="measure how long a new interpreter takes to the end of its first step, alone")
    p.add_argument("--device", default=default_device())
    p.add_argument("--budget-s", type=float, default=float("inf"), help="seconds after which everything ends")
    p.add_argument("--results", type=Path, help="folder for <gpu>/<name>.csv; on a CPU nothing is written without it")
    p.add_argument("--child", help=argparse.SUPPRESS)
    return p


def check_providers(p: argparse.ArgumentParser, args, family: Family) -> None:
    """End the program for a provider that the model's family does not have."""
    if unknown := set(args.providers) - set(family.providers):
        known = ", ".join(family.providers)
        p.error(f"argument --providers: {', '.join(sorted(unknown))}, expected some of {known} for {args.model}")


def child_arguments(args, provider: str) -> list[str]:
    """Return the command line of a measuring process: all that the parent's says of the steps."""
    given, found = vars(args) | {"child": provider, "layers": args.layers or models.size(args.model).layers}, []
    for name, value in given.items():
        if name in OF_THE_PARENT or value is None or value is False or value == "":  # but for 0, which may not be the option's default
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        found += [f"--{name}"] if value is True else [f"--{name}", text]
    return found


def run_all(kernel: str, script: str, args, gpus: int = 1, collect: type[Results] = Results) -> Results:
    """Run all providers in turns, every second round backwards, and write what they report as it comes."""
    args.results = results_folder(args)
    args.model = models.full_name(args.model)
    if args.layers == models.size(args.model).layers:
        args.layers = None  # as without the option: the same rows of the results
    deadline = time.monotonic() + args.budget_s
    results = collect(kernel, args, gpus)
    for turn in range(args.rounds):
        for provider in args.providers[:: -1 if turn % 2 else 1]:
            if time.monotonic() > deadline:
                results.add(provider, {"kind": "late"})
                continue
            log(f"{provider}, round {turn + 1}")
            group = Group(script, child_arguments(args, provider), gpus, args.fresh or provider in BEFORE_TRANSFORMERS)
            try:
                for report in group.reports(deadline):
                    results.add(provider, report)
                    results.save()
            finally:
                group.end()
    results.print_table()
    return results


def form_of(args) -> Form:
    """Return the form of the batches that the command line asks for."""
    return Form(args.documents, args.rows, args.padding)


def add_recipe(p: argparse.ArgumentParser, lora: int = 0) -> None:
    """Add the options of what is trained, and how. lora: the rank unless told otherwise."""
    p.add_argument("--lora", type=int, default=lora, help="the rank of PEFT's adapters on all projections; 0 trains all weights")
    p.add_argument("--attention", action="store_true", help="adapters on the projections of attention alone")
    p.add_argument("--autocast", action="store_true", help="to bf16, as bf16=True of a Trainer does it")
    p.add_argument("--weights", choices=("bf16", "fp32", "nf4"), default="bf16", help="the dtype of the weights; nf4 is QLoRA")
    p.add_argument("--checkpointing", action="store_true", help="of every layer's activations")
    p.add_argument("--parts", action="store_true", help="also where the GPU's time of a step goes, in a file of its own")
    p.add_argument("--loss", choices=("", *LOSSES), default="", help=f"of TRL's trainer, over {ROWS} rows; without it the model's own")
    kinds = (routing.UNIFORM, routing.SKEWED)
    p.add_argument("--routing", choices=kinds, default=routing.UNIFORM, help="where a mixture of experts sends its tokens, see routing.py")


def recipe_of(args) -> Recipe:
    """Return what the command line says of what is trained, and how."""
    names = [field.name for field in dataclasses.fields(Recipe)]
    return Recipe(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def new_model(args):
    """Return the model that the command line asks for, with weights of that form."""
    family, recipe = families.family_of(args.model), recipe_of(args)
    model = family.new_model(args, args.device)
    families.fill(model, kind=recipe.routing)
    return nf4.in_nf4(model, args.device) if recipe.weights == "nf4" else model


def check_weights(p: argparse.ArgumentParser, args) -> None:
    """End the program for weights that the model cannot be trained with."""
    recipe = recipe_of(args)
    if recipe.weights != "bf16" and models.size(args.model).experts:
        p.error(f"argument --weights: {recipe.weights} is for dense models, and the model is {args.model}")
    if recipe.weights == "nf4" and not recipe.lora:
        p.error("argument --weights: nf4 weights are frozen below adapters; ask for --lora")


def build(args) -> Stepper:
    """Return what a measuring process steps."""
    family, recipe = families.family_of(args.model), recipe_of(args)
    model = new_model(args)
    if family.by_model and is_ours(args.child):
        package(family.package).kernelize(model)
    model, loss = (unsloth_peer.adapted(model, recipe.lora), None) if args.child == "unsloth" else recipe.adapt(model, args.device)
    families.fill(model, "lora_")
    for function in FROZEN.get(args.child, ()):
        getattr(package(family.package), function)(model)
    if recipe_of_torchao := compiled_peer.RECIPES.get(args.child):
        model = compiled_peer.in_eight_bits(model, recipe_of_torchao)
    if family.packs and is_ours(args.child) and args.child != "bastile_unpacked":
        package(family.package).pack(model)
    optimizer = families.make_optimizer(model, args.device, args.child, family.package)
    begin = compiled_peer.compile_layers if args.child in compiled_peer.RECIPES else None
    if args.child in CAPTURED:
        begin = package(family.package).capture
    form, parts = form_of(args), getattr(args, "parts", False)
    return Stepper(model, optimizer, args.device, model.config.get_text_config().vocab_size, 0, form, recipe.autocast, begin, loss, parts)


def main(
    arguments=None, lora: int = 0, tokens: tuple[int, ...] | None = None, layers: int | None = None, peers: tuple[str, ...] = (),
    collect: type[Results] = Results,
):  # fmt: skip
    """Measure the steps of a model, or do so in a measuring process.

    lora, tokens, layers: what is taken unless told otherwise. peers: providers beside those of the model's family; collect: what takes the
    reports in.
    """
    p = parser("Training steps on one GPU.", tokens)
    add_recipe(p, lora)
    args = p.parse_args(arguments)
    family, recipe = families.family_of(args.model), recipe_of(args)
    if args.child:
        return child(args, build, family.prepare)
    args.tokens, args.layers = args.tokens or family.tokens, args.layers or layers or family.layers
    form = form_of(args)
    usual = family.masked_providers if form.masked else family.step_providers
    usual = TRL_PROVIDERS if recipe.loss else tuple(name for name in usual if name != "torch_compile" or not recipe.name)
    args.providers = args.providers or in_order({*usual, *(set(peers) & set(family.providers))})
    check_providers(p, args, family)
    if recipe.checkpointing and (found := compiled_peer.RECIPES.keys() & set(args.providers)):
        p.error(f"argument --providers: {', '.join(sorted(found))} compile no checkpoints; leave them out, or --checkpointing")
    if "unsloth" in args.providers and (not recipe.lora or recipe.weights != "bf16"):
        p.error("argument --providers: unsloth trains adapters over bf16 weights; leave it out, or ask for --lora")
    if not recipe.lora and (found := FROZEN.keys() & set(args.providers)):
        p.error(f"argument --providers: {', '.join(sorted(found))} train adapters over frozen weights; leave them out, or ask for --lora")
    if recipe.attention and not recipe.lora:
        p.error("argument --attention: it says where adapters are; leave it out, or ask for --lora")
    if recipe.loss and (form.name or {*compiled_peer.RECIPES, *CAPTURED, "unsloth"} & set(args.providers)):
        p.error("argument --loss: a trainer of TRL has its own batches, which are not compiled, captured or Unsloth's; leave these out")
    if recipe.loss and min(args.tokens) < 2 * ROWS:
        p.error(f"argument --tokens: {min(args.tokens)}, expected at least {2 * ROWS} for the rows of --loss")
    check_weights(p, args)
    if recipe.routing != routing.UNIFORM and not models.size(args.model).experts:
        p.error(f"argument --routing: {args.model} has no experts")
    eight_bits = "_fp8" * bool(EIGHT_BITS & set(args.providers))
    return run_all(f"{family.name}_step{recipe.name}{form.name}{eight_bits}" + "_parts" * args.parts, __file__, args, collect=collect)


if __name__ == "__main__":
    main()
