"""Training steps inside a measuring process, which prints one line of JSON for everything that it finds out."""

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import records, routing, step_parts
from .memory import GiB, held_by_graphs
from .providers import NotInstalled, require_modules
from .report import message
from .trl_losses import TrainerLoss

MARK = "@result "
ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
EXPERTS = "experts.gate_up_proj", "experts.down_proj"  # ends of the names of the parameters that all experts of a layer are in
LOSSES = 5  # of the first steps, compared between providers


def training_step(model, optimizer, batch: dict, autocast: bool = False, loss_of: Callable | None = None) -> torch.Tensor:
    """Do one step of next-token prediction, or of the loss that loss_of(batch) returns, its forward pass under autocast to bf16 where that
    is asked for, and return the loss."""
    # Only the loss is kept, so that logits that a provider returns do not live until the end of the backward pass.
    with torch.autocast(next(iter(batch.values())).device.type, torch.bfloat16, enabled=autocast):
        loss = loss_of(batch) if loss_of else model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@dataclass(frozen=True)
class Form:
    """Describes the layout of a batch, whose tokens are counted over all rows.

    documents: the number of documents packed into a row, all of one length; position_ids restart with each. rows: the number of rows.
    padding: the share of the batch that is padding; it follows each row's tokens, and its length varies from row to row.
    """

    documents: int = 1
    rows: int = 1
    padding: float = 0.0

    @property
    def name(self) -> str:
        """Return what tells the results of this form from those of one sequence: "" for that one."""
        found = f"_{self.documents}_documents" if self.documents > 1 else ""
        return found + (f"_{self.rows}_rows_padding_{self.padding:g}" if self.rows > 1 or self.padding else "")

    @property
    def masked(self) -> bool:
        """Tell whether some token must not see some token before it."""
        return self.documents > 1 or self.padding > 0

    def batch(self, ids: torch.Tensor) -> dict:
        """Return the arguments of a causal LM. ids: [1, tokens]."""
        tokens, device = ids.shape[1], ids.device
        if self.documents > 1:
            length = -(-tokens // self.documents)
            labels = ids.masked_fill(torch.arange(tokens, device=device) % length == 0, -100)  # of another document's first token
            return {"input_ids": ids, "labels": labels, "position_ids": (torch.arange(tokens, device=device) % length)[None]}
        if self.rows == 1 and not self.padding:
            return {"input_ids": ids, "labels": ids}
        length = tokens // self.rows
        ids = ids[:, : self.rows * length].view(self.rows, length)
        share = torch.linspace(0, 2 * self.padding, self.rows) if self.rows > 1 else torch.tensor([self.padding])
        real = (length * (1 - share)).round().long().clamp(min=2).to(device)
        mask = (torch.arange(length, device=device) < real[:, None]).long()
        return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


@dataclass(frozen=True)
class Recipe:
    """A way of training a model.

    lora: the rank of PEFT's adapters on all projections and experts, the only weights trained then; 0 to train all weights. attention:
    whether those of attention alone have adapters. autocast: to bf16, as `bf16=True` of a Trainer does it. weights: their dtype, or "nf4",
    in bitsandbytes' four bits. checkpointing: of every layer. routing: of routing.py, for a model with experts. loss: of trl_losses.py; ""
    for the model's own.
    """

    lora: int = 0
    attention: bool = False
    autocast: bool = False
    weights: str = "bf16"
    checkpointing: bool = False
    routing: str = routing.UNIFORM
    loss: str = ""

    @property
    def name(self) -> str:
        """Return what tells the results of this recipe from those of bf16 weights that are all trained: "" for that one."""
        found = f"_lora_{self.lora}" * bool(self.lora) + "_attention" * self.attention + "_autocast" * self.autocast
        found += f"_{self.weights}" * (self.weights != "bf16") + "_checkpointing" * self.checkpointing
        return found + f"_{self.routing}" * (self.routing != routing.UNIFORM) + f"_{self.loss}" * bool(self.loss)

    def peft_config(self, model=None):
        """Return the adapters that PEFT is to put into a model, None for none. model: one whose experts get some too, which "all-linear"
        does not mean in every family."""
        if not self.lora:
            return None
        require_modules("peft")
        from peft import LoraConfig

        known = [] if model is None or self.attention else [name for name, _ in model.named_parameters()]
        more = {"task_type": "CAUSAL_LM", "target_parameters": [name for name in known if name.endswith(EXPERTS)] or None}
        modules = list(ATTENTION) if self.attention else "all-linear"
        return LoraConfig(r=self.lora, lora_alpha=2 * self.lora, target_modules=modules, **more)  # type: ignore[arg-type]

    def adapt(self, model, device: str):
        """Return the model as it is trained, itself or a PEFT model whose adapters are drawn, and the loss that is not its own, or None."""
        if self.checkpointing:
            model.gradient_checkpointing_enable()
        config = self.peft_config(model)
        if self.loss:
            found = TrainerLoss(self.loss, model, config, device)
            return found.trainer.model.train(), found
        if config is None:
            return model, None
        from peft import get_peft_model

        return get_peft_model(model, config).train(), None


@dataclass
class Stepper:
    """A model in training, and the means to measure it. begin(model, rows, tokens): called before the steps of each length, to record CUDA
    graphs, say, or to compile. loss: of batches of its own, in place of the model's over those of `form`. parts: whether to ask where the
    GPU's time goes."""

    model: object
    optimizer: object
    device: str
    vocab: int
    rank: int = 0
    form: Form = Form()
    autocast: bool = False
    begin: Callable | None = None
    loss: TrainerLoss | None = None
    parts: bool = False

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def ids(self, tokens: int) -> torch.Tensor:
        """Return the token ids of a sequence, other ones on each rank."""
        generator = torch.Generator().manual_seed(1000 * self.rank + tokens)
        return torch.randint(self.vocab, (1, tokens), generator=generator).to(self.device)

    def timed(self, batch: dict) -> tuple[float, torch.Tensor]:
        """Return the milliseconds of one step from an idle device to an idle device, and its loss."""
        self.synchronize()
        start = time.perf_counter()
        loss = training_step(self.model, self.optimizer, batch, self.autocast, self.loss)
        self.synchronize()
        return (time.perf_counter() - start) * 1e3, loss

    def run(self, tokens: int, warmup: int, steps: int) -> dict:
        """Do steps at one length, and return the milliseconds of each, those of the first, losses, peak memory in GiB, the parts of the
        GPU's time, and where a model with experts sends its tokens."""
        gc.collect()
        cuda = self.device.startswith("cuda")
        if cuda:
            torch.cuda.empty_cache()
        batch = (self.loss or self.form).batch(self.ids(tokens))
        routed = None if self.loss else routing.record(self.model, **{name: value for name, value in batch.items() if name != "labels"})
        if self.begin:
            self.begin(self.model, *batch["input_ids"].shape)
        timed = [self.timed(batch) for _ in range(warmup)]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        timed += [self.timed(batch) for _ in range(steps)]
        peak = (torch.cuda.max_memory_allocated() + held_by_graphs()) / GiB if cuda else None
        milliseconds, losses = zip(*timed, strict=True)
        return {
            "tokens": tokens,
            "ms": milliseconds[warmup:],
            "first_ms": milliseconds[0],
            "peak_gib": peak,
            "losses": [loss.item() for loss in losses[:LOSSES]],
            "parts": step_parts.parts_of(lambda: self.timed(batch)) if self.parts else {},
            "routing": routed and routed.asdict(),
        }


def emit(kind: str, **content) -> None:
    """Report something to the parent."""
    print(MARK + json.dumps({"kind": kind, **content}), flush=True)


def measure(stepper, args, started: float, report=emit) -> bool:
    """Measure all lengths, shortest first, until one does not fit; tell whether all did. started: when the process began to prepare its
    provider."""
    report("ready", gpu=records.gpu_name(args.device), seconds=time.perf_counter() - started)
    for tokens in sorted(args.tokens):
        try:
            found = stepper.run(tokens, args.warmup, args.steps)
        except Exception as error:
            report("failed", tokens=tokens, error=message(error))
            print(message(error), file=sys.stderr, flush=True)  # of a process that reports nothing else
            return False
        report("result", **found)
    return True


def child(args, build: Callable, prepare: Callable[[str], None]) -> bool:
    """Run a measuring process, and tell whether everything was measured. prepare(provider) puts it into transformers, build(args) makes
    what is measured; what keeps that from being made is reported."""
    started = time.perf_counter()
    try:
        prepare(args.child)
        stepper = build(args)
    except NotInstalled as error:
        emit("absent", error=str(error))
        return True
    except Exception as error:
        emit("failed", tokens=0, error=message(error))
        return False
    return measure(stepper, args, started, emit if stepper.rank == 0 else lambda *_, **__: None)
