"""What a user calls alike in every package that puts layers on models of transformers."""

from typing import Any, Callable, Dict, Mapping, Sequence, Type

from torch import nn

from ...runtime.tuning import TOKENS, clear_autotune_cache, warm_up_models
from ..capture.when_told import SIZES
from ..family import options, ownership, versions
from ..layer import eight_bit_weights, four_bit_weights
from ..parts import host_embedding
from ..parts.modules import Layer
from ..say import doctor
from ..say.gathered import as_in_a_pass
from . import one_model, patching, warmup
from .served import Served
from .shapes import Shapes
from .warmup import Case

__all__ = ["Interface"]


class Interface:
    """Holds the calls of one package. Its `__init__` gives them their public names, so that each has its text here once.

    package: the name of the package as it was imported. served: the families that it serves. layers: its module of layers, under whose
    names the Hub finds them. named: those of them that stand under names of the Hub which several families share, or none has.
    """

    def __init__(self, package: str, served: Sequence[Served], layers: Any = None, named: Mapping[str, Type[nn.Module]] = {}):
        self._package, self.served, self._named = package, served, named
        found = reversed(list(vars(layers).items())) if layers else ()
        named_here = {layer: name for name, layer in found if isinstance(layer, type) and issubclass(layer, Layer) and layer is not Layer}
        for layer, name in named_here.items():  # by its first name, where it has two
            layer.__module__, layer.__name__, layer.__qualname__ = layers.__name__, name, name
        # A family may be served with others, too: the last row of it counts.
        self.rows = tuple({own.family.modeling: own for each in served for own in each.rows}.values())
        self.families = tuple({targets.modeling: targets for each in served for targets in each.families()}.values())
        has_experts = any("experts" in each.options for each in served)
        self._shapes = Shapes(self.rows, has_experts) if any(each.shapes for each in served) else None
        self.apply = self._make_apply()
        ownership.claim_layers(self.families)

    def _make_apply(self) -> Callable[..., None]:
        """`apply` of the package, with the options of its families."""
        names = tuple(dict.fromkeys(name for each in self.served for name in each.arguments()))
        signature = options.signature_of(names)

        def apply(*args, **kwargs):
            self.put_on_classes(options.given(signature, args, kwargs))

        apply.__signature__ = signature  # type: ignore[attr-defined]
        apply.__doc__ = options.text_of(names, ", ".join(targets.model for targets in self.families))
        apply.__module__ = self._package
        return apply

    def put_on_classes(self, given: Dict[str, Any]) -> None:
        """What `apply` does. given: each of its options."""
        told = options.Settings(**{name: given.pop(name) for name in options.Settings._fields})
        patching.patch_classes(self.families, given, told)

    def kernelize(
        self, model, mode=None, attention=True, unpad=True, keep_attention=False, recompute_mlp=False, log_probs=True, products="bf16",
        offload=False, capture=False,
    ):  # fmt: skip
        """Puts the layers on one model, in place, and returns it. Other models, also later ones, are left alone.

        Call it before creating a trainer. A part whose forward was replaced before (tensor parallelism does it with q_norm and k_norm)
        keeps that, with a warning. For torch.nn.DataParallel use `apply`: its replicas would call the forwards of the model that they were
        copied from.

        `bastile`, and the packages of decoders and of moe, also take a model of no family, such as one in a file of your own or in remote
        code. Its decoder layers are read, and compared on a small copy, results and gradients, with their own forwards, which takes a
        second, once. Layers that can be read are fused, and parts of them that cannot be read are called as they are. The loss needs no
        logits where the forward's use of them can be followed, also with a vision or audio tower. `explain` says what stays as it is,
        with the line that decided.

        Args:
            model: one of transformers, with or without a head, alone or inside another module (PEFT).
            mode: a `kernels.Mode`; the layers serve all of them, so it changes nothing.
            attention, unpad, keep_attention, recompute_mlp, log_probs, products, offload, capture: as in `apply`.

        Raises:
            TypeError: when the model has none of the layers that this package replaces.
            ValueError: for `kernels.Mode.FALLBACK`, unknown products, and values that `recompute_mlp`, `offload` or `capture` cannot
                have, or not without `attention`.
            RuntimeError: when not all operations could be put on it.
            ImportError: when transformers is absent or its version does not fit.
        """
        told = options.Settings(unpad, keep_attention, recompute_mlp, log_probs, products, offload, capture)
        return one_model.kernelize(self.families, model, told, mode, attention, self._shapes)

    def eight_bits(self, model):
        """Turns the frozen weights of the decoder layers' linear layers to eight bits, in place, and returns the model: half their
        memory, as QLoRA's four bits are a quarter.

        q, k, v, o, and of dense layers gate, up and down become codes in float8_e4m3fn with one scale, a power of two, for the weights that
        read one input. That rounds each number once, by a sixteenth of it at most. Embeddings, head, norms, biases, routers and experts
        stay as they are; experts may be in four bits (`four_bits`, before or after).
        Products are made in 16 bits of the numbers that the codes stand for, which bf16 holds exactly; with `products="fp8"` they are made
        of the codes, where they are in eight bits; what moves these in memory costs speed until `pack(model)` is called. Call it before or
        after `kernelize`, `apply` and `get_peft_model`, before DDP and FSDP2.

        Adapters are saved as usual. `save_pretrained` and state dicts have the codes, in the layout of transformers' FineGrainedFP8, which
        `from_pretrained` reads; of a model with experts, for which that layout has no place, the numbers in 16 bits. Merging adapters
        writes to weights and is refused: call `sixteen_bits(model)` first. A model that transformers loaded from such a layout, in blocks
        with scales of their own, is taken too, and rounded once more.

        model: alone or inside another module (PEFT), on its device. Raises ValueError that names the weight where one is to be trained
        (`model.requires_grad_(False)` freezes all), is not finite, or is held by another kind of layer, and where another library has
        quantised the model; nothing is changed then. Raises TypeError when the model has no decoder layers of this kind.
        """
        return eight_bit_weights.eight_bits(self._layers_of(model), model)

    def four_bits(self, model, kind=None):
        """Turns the frozen weights of experts to four bits, in place, and returns the model: a quarter of their memory.

        gate_up and down of every decoder layer with experts become MXFP4, as GPT-OSS was released, which gives such a model its released
        numbers back exactly; or NF4 by bitsandbytes, with its double quantisation. Routers, shared experts, biases, attention, embeddings
        and head stay as they are. A layer makes each weight anew for a product and frees it, so nothing of its size is kept for the
        backward pass. Experts that bitsandbytes keeps in four bits already are taken as they are.

        Call it before or after `kernelize` and `apply`, after `get_peft_model` (PEFT finds the names of weights in four bits only where
        `target_parameters` has them in full), and before DDP and FSDP2. Adapters are saved as usual. State dicts have GPT-OSS's blocks and
        scales, or what bitsandbytes saves of parameters; `save_pretrained` writes the former, and raises for the latter. Merging adapters
        writes to weights and is refused: call `sixteen_bits(model)` first.

        model: alone or inside another module (PEFT), on its device. kind: "mxfp4", for GPT-OSS alone, or "nf4"; by default the first where
        it is possible. Raises ValueError that names the weight where one is to be trained, is not finite, or is of another kind, and where
        another library has quantised the model; nothing is changed then. Raises TypeError when the model has no layers of experts, and
        ImportError for "nf4" without bitsandbytes.
        """
        return four_bit_weights.four_bits(self._layers_of(model), model, kind)

    def _layers_of(self, model):
        return [(own, layer) for layer in model.modules() for own in self.rows if warmup.is_layer_of(own, layer)]

    def sixteen_bits(self, model):
        """Turns what `eight_bits` and `four_bits` did back, in place, and returns the model: torch.nn.Linear and parameters of experts,
        frozen, with the numbers that the codes stand for, in the dtype of before. What was rounded stays rounded. Does nothing to a model
        without such weights."""
        return eight_bit_weights.sixteen_bits(model)

    def host_embeddings(self, model):
        """Keeps the frozen embedding of a model's tokens in the host's memory, in place, and returns the model: 1.2 GB for GPT-OSS-20B, of
        which a step reads only the rows of its tokens.

        Each pass looks them up on the host and copies them to the device; with ids on a GPU the host waits for it once a pass. Call it at
        any time, before or after `kernelize` and `get_peft_model`; results are on the device that held the weight, or to which the model is
        moved later. State dicts and `save_pretrained` have the weight as before.

        model: alone or inside another module (PEFT). Raises ValueError that names the embedding where it is to be trained, tied to the
        head, sharded, has adapters or does more than look up. Raises TypeError for a model without an embedding.
        """
        return host_embedding.host_embeddings(model)

    def explain(self, model):
        """Says which parts of a model run fused and, for the others, why not and what to do about it.

        model: alone or inside another module (PEFT). Returns an `Explanation`: printed, a table; its `rows` have the fields `part`,
        `count`, `fused`, `reason`, `advice` and `code`. The answer holds for the state in which the model is now (its adapters, hooks,
        autocast), so ask where the training step would be, and not while another thread trains the model. Raises TypeError when the
        model has no decoder layers of this kind.
        """
        with as_in_a_pass(model):
            return one_model.explain(self.families, model, self._shapes)

    def report(self, check=False):
        """Examines this machine: the GPUs and which kernels serve them, the driver, and which versions fit, with advice where they do not.

        check: also compares every operation on the current GPU, forward and backward and in each dtype, with float64 on the CPU; that takes
        about a minute.
        Returns a `Report`: printed, what belongs in a bug report; its `findings` have the fields `name`, `found`, `fits` and `advice`.
        `python -m bastile` prints it too, with `--check` for `check`.
        """
        return doctor.report(self._package, check=check, more=self._findings())

    def _findings(self):
        """The functions of transformers that changed since the tested releases."""
        if not versions.is_installed():
            return ()
        unknown = {targets.model: versions.by_argument(targets, versions.unfit_texts(targets)) for targets in self.families}
        left = versions.what_is_left(unknown)
        return (doctor.Finding("transformers' texts", left or "known", not left, versions.ADVICE if left else ""),)

    def capture(self, model, batch=None, tokens=None, sizes=SIZES, memory=None):
        """Replays the decoder layers as CUDA graphs in training, for inputs of [batch, tokens], or without a shape for the most frequent
        lengths, and returns the model.

        With few tokens or a small model the host cannot start kernels as fast as the GPU finishes them; several layers that follow each
        other are replayed with two launches. Results are the same bit for bit. The first training pass of that shape (labels, gradients
        on) runs as before and is observed, the second one is recorded, in less than a second. Call it again for further shapes. Pad every
        batch to one of them (`pad_to_multiple_of`, `padding="max_length"`), keep to `use_cache=False`, and call it last: after `apply` or
        `kernelize`, `pack`, PEFT and the move to the GPU. Trainer, autocast, LoRA and every optimizer work as without it. In training mode
        passes without gradients (DPO's reference) are replayed, too.

        Where lengths vary, leave the shape out: padding is left out of batches and lengths are rounded first (`unpad` of `apply`), and the
        layers get graphs for each length that recurs, up to `sizes` of them; a length that occurs twice as often as the rarest of these
        takes its place. Rows get up to an eighth more tokens, of no text, so that lengths are few. Documents may begin anywhere in a batch.
        `explain` says how many passes are replayed, and the memory.

        Checkpointed layers (`use_reentrant=False`) run again in the backward graph. Other shapes, evaluation, generation and layers with
        hooks run as before, with a warning where a shape was asked for and could not be recorded. When weights move or adapters change it
        is recorded anew. The gradients of the layers' weights lie in memory that the next pass writes: clone one to keep it beyond. That
        memory, and one layer's input for each layer, is held until `reset()`.

        model: with this package's layers or without, alone or inside another module (PEFT), on one GPU; DDP may be put around it
        afterwards. batch, tokens: the sequences of a batch and their length. sizes: lengths, or shapes, with graphs at a time. memory: GiB
        that graphs of such sizes may take; None for a quarter of the GPU's. They all share what the largest needs. Raises TypeError when
        the model has no decoder layers of this kind, or some without a row that are not fused whole, ValueError when it is on no GPU or a
        number is not positive, RuntimeError when accelerate holds its layers.
        """
        return one_model.capture(self.families, model, batch, tokens, sizes, memory)

    def mapping(self, mode=None):
        """The layers for `kernels.use_kernel_mapping` or `kernels.register_kernel_mapping`, for CPUs and for GPUs of compute
        capability 8.0 to 12.1. mode: the only `kernels.Mode` that they are for; by default they are for all.

        Also gives the Hub's names to those of transformers' classes that have none, so `kernels.kernelize` finds them.
        Warns when it cannot find all: where transformers and `kernels` do not fit, it passes the rotary embedding by.

        Raises ImportError when transformers or `kernels` is absent or its version does not fit.
        """
        return patching.mapping(self.families, mode, self._named)

    def get_patched_ops(self):
        """Lists the operations that `apply` has put on transformers' classes, by the names of its arguments."""
        return patching.get_patched_ops(self.families)

    def reset(self):
        """Puts everything back: transformers' classes and functions, and every module that has a forward of this package.

        Undoes `apply`, `kernelize`, `mapping`, and `kernels.kernelize` with that mapping. Does nothing where transformers is not imported.
        Families that another package of Bastile serves stay as they are.
        """
        patching.reset(self.families)

    def warmup_all_kernels(self, model=None):
        """Loads what a model needs ahead of its first step, and finds the fastest kernels for this GPU.

        Each operation runs once, forward and backward, on a few tokens. Where a kernel has several prebuilt candidates (most have them on
        GPUs that we could not measure, few on an H200), they are timed, in a few seconds and 1.5 GiB at the sizes of an 8B model. The
        measurements are kept in `cache_file()` by GPU, driver and build of this package: the next process only reads them. A process that
        does not call this launches the default candidates. Two candidates may differ in the last bit of a result; two launches of one
        never do.

        model: whose layers, sizes, dtypes and GPUs; by default common sizes of the package's families in bf16 on the current GPU. The
        model, its gradients and the random numbers are left alone. On a CPU there is nothing to load. Raises TypeError when the model is
        of no family of the package.
        """
        warm_up_models(self.warm_up, model, self.case_of, [case for each in self.served for case in each.cases])

    def clear_autotune_cache(self):
        """Forgets which kernels were measured to be the fastest, in this process and on disk. From then on the default ones run, until the
        next `warmup_all_kernels`. Raises OSError when the cache file cannot be removed."""
        clear_autotune_cache()

    def warm_up(self, device, dtype, case: Case, tokens: int = TOKENS) -> None:
        """Runs the layers of a case forward and backward on some tokens, as `warmup.warm_up`."""
        next(each for each in self.served if case.own in each.rows).warm_up(device, dtype, case, tokens=tokens)

    def case_of(self, model) -> Case:
        """Reads the sizes of a model (`warmup.case_of`)."""
        return warmup.case_of(model, self.rows, next((each.other for each in self.served if each.other is not None), None))
