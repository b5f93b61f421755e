"""Random sequences of what users do with a model, beside a twin that never meets this package: after each one a step has the same
numbers, and every function that the user put somewhere is called as often.

A failure names the sequence: `walk(seed)` runs it again.
"""

import contextlib
import copy
import io
import random
import warnings
from collections import Counter
from types import MethodType

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from tests.models import Step, random_tokens, tiny_model
from tests.tolerances import assert_close
from tests.versions import DECORATORS, cell_of

TOKENS, STEPS, SEEDS, FACTOR = random_tokens(2, 9), 14, 16, 30
INPUTS = {"input_ids": TOKENS, "labels": TOKENS}
NAMES = ("Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention", "Qwen3DecoderLayer", "Qwen3ForCausalLM")
PARTS = (
    "model.layers.0.mlp", "model.layers.1.self_attn", "model.layers.0.self_attn.q_norm", "model.layers.1.input_layernorm", "model.layers.0",
    "model.norm", "model.layers.1.mlp.act_fn", "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj", "lm_head",
)  # fmt: skip


def scaled(found):
    if isinstance(found, torch.Tensor):
        return found * 1.25
    return (found[0] * 1.25, *found[1:]) if isinstance(found, tuple) else found  # a causal LM's output stays


class Walk:
    def __init__(self, package, folder, seed):
        self.package, self.folder, self.random = package, folder, random.Random(seed)
        self.model = tiny_model(attn_implementation="eager", tie_word_embeddings=seed % 2 == 1)
        self.twin = copy.deepcopy(self.model)
        self.log, self.done, self.patches, self.number = [], [], [], 0
        self.places = [(getattr(modeling_qwen3, name), "forward") for name in NAMES]
        self.places += [(modeling_qwen3, name) for name in ("apply_rotary_pos_emb", *NAMES)]
        self.plain = {place: vars(place[0])[place[1]] for place in self.places}  # what the twin sees
        self.rotary = type(modeling_qwen3.apply_rotary_pos_emb)
        if DECORATORS:
            self.plain[self.rotary, "forward"] = self.rotary.forward
        self.cell = cell_of(modeling_qwen3.Qwen3DecoderLayer)
        self.inside = self.cell and self.cell.cell_contents

    @contextlib.contextmanager
    def without_us(self):
        ours, inside = {place: vars(place[0])[place[1]] for place in self.plain}, self.cell and self.cell.cell_contents
        try:
            if self.cell is not None:
                self.cell.cell_contents = self.inside
            for (owner, name), thing in self.plain.items():
                setattr(owner, name, thing)
            yield
        finally:
            for (owner, name), thing in ours.items():
                setattr(owner, name, thing)
            if self.cell is not None:
                self.cell.cell_contents = inside

    def both(self, action):
        action(self.model)
        with self.without_us():
            action(self.twin)

    def logging(self, function, name):
        def mine(*args, **kwargs):
            self.log.append(name)
            return scaled(function(*args, **kwargs))

        return mine

    # ---------------------------------------------------------------- the package
    def apply(self):
        names = ("rms_norm", "swiglu", "rope", "fused_linear_cross_entropy", "decoder_layer")
        everything = self.random.random() < 0.6
        self.package.apply(**{name: everything or self.random.random() < 0.5 for name in names})

    def kernelize(self):
        try:
            self.package.kernelize(self.model)
        except (RuntimeError, TypeError) as error:
            assert self.patches or "bind" in self.done or "rebuild" in self.done, error  # or nothing stands in the way

    def reset(self):
        self.package.reset()

    def pack(self):
        self.package.pack(self.model)

    # ---------------------------------------------------------------- the user
    def patch(self):
        """A forward on a class, or a function in transformers' module."""
        places = [(modeling_qwen3, "apply_rotary_pos_emb"), *self.places[: len(NAMES)]]
        owner, name = place = self.random.choice(places)
        self.number += 1
        label, current = f"patch {self.number} of {owner.__name__}", vars(owner)[name]
        self.patches.append((place, current, self.plain[place]))
        self.plain[place] = self.logging(self.plain[place], label)
        setattr(owner, name, self.logging(current, label))

    def replace(self):
        """A class of the user's in the place of one of transformers', for the models that are made from now on."""
        place = modeling_qwen3, self.random.choice(NAMES[:4])
        self.number += 1
        label, current, walk = f"class {self.number} for {place[1]}", vars(place[0])[place[1]], self

        class Mine(current):
            def forward(self, *args, **kwargs):
                walk.log.append(label)
                return scaled(super().forward(*args, **kwargs))

        self.patches.append((place, current, self.plain[place]))
        self.plain[place] = Mine
        setattr(*place, Mine)

    def unpatch(self):
        if self.patches:
            place, current, plain = self.patches.pop()
            self.plain[place] = plain
            setattr(*place, current)

    def bind(self):
        """A forward on one module."""
        part = self.random.choice(PARTS[:-2])
        self.number += 1
        label = f"bound {self.number} to {part}"

        def put(model):
            module, walk = model.get_submodule(part), self
            previous = getattr(module.forward, "__func__", None) or type(module).forward

            def mine(module, *args, **kwargs):
                walk.log.append(label)
                return scaled(previous(module, *args, **kwargs))

            module.forward = MethodType(mine, module)

        self.both(put)

    def hook(self):
        part, kind = self.random.choice(PARTS), self.random.choice(["forward", "forward_pre", "full_backward"])
        self.number += 1
        label = f"{kind} hook {self.number} of {part}"

        def put(model):
            def seen(module, args, *rest):
                self.log.append(label)
                return scaled(rest[0]) if kind == "forward" else None

            seen.of_walk = True
            getattr(model.get_submodule(part), f"register_{kind}_hook")(seen)

        self.both(put)

    def unhook(self):
        def take(model):
            for module in model.modules():
                for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
                    for key in [key for key, hook in hooks.items() if hasattr(hook, "of_walk")]:
                        del hooks[key]

        self.both(take)

    def capture(self):
        name = self.random.choice(["hidden_states", "attentions"])
        found = []
        self.both(lambda model: found.append(model.eval()(input_ids=TOKENS, **{f"output_{name}": True})[name]))
        for a, b in zip(*found, strict=True):
            assert_close(a, b, torch.float32, name, FACTOR)

    def freeze(self):
        name = self.random.choice([name for name, _ in self.model.named_parameters()])
        self.both(lambda model: model.get_parameter(name).requires_grad_(not model.get_parameter(name).requires_grad))
        self.both(lambda model: model.get_input_embeddings().weight.requires_grad_())

    def checkpoint(self):
        on = self.random.random() < 0.7
        reentrant = {"use_reentrant": False}
        self.both(lambda m: m.gradient_checkpointing_enable(reentrant) if on else m.gradient_checkpointing_disable())

    def copy(self):
        self.model, self.twin = copy.deepcopy(self.model), copy.deepcopy(self.twin)

    def train(self):
        def step(model):
            model.train()(**INPUTS).loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(1e-3 * parameter.grad / parameter.grad.norm().clamp(min=1e-6))
                        parameter.grad = None

        self.both(step)
        for (name, a), b in zip(self.model.state_dict().items(), self.twin.state_dict().values(), strict=True):
            assert_close(a, b, torch.float32, name, FACTOR)
        self.twin.load_state_dict(self.model.state_dict())

    def save_and_load(self):
        """The model's state through a file, over numbers that are all wrong."""
        from safetensors.torch import load_model, save_model

        kept = {name: value.clone() for name, value in self.model.state_dict().items()}
        file, through = io.BytesIO(), self.random.choice(["torch", "safetensors"])
        torch.save(self.model.state_dict(), file) if through == "torch" else save_model(self.model, self.folder / "model.safetensors")
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(7.0)
        file.seek(0)
        self.model.load_state_dict(torch.load(file)) if through == "torch" else load_model(self.model, self.folder / "model.safetensors")
        for name, value in self.model.state_dict().items():
            assert torch.equal(value, kept[name]), f"{name} through {through}"

    def rebuild(self):
        """Saved, and loaded as a new model without what the user had put on the old one."""
        self.model.save_pretrained(self.folder / "model")
        self.model = AutoModelForCausalLM.from_pretrained(self.folder / "model", attn_implementation="eager")
        with self.without_us():
            self.twin = AutoModelForCausalLM.from_pretrained(self.folder / "model", attn_implementation="eager")

    # ---------------------------------------------------------------- the comparison
    def compare(self):
        logs, found = [], []

        def run(model):
            self.log.clear()
            step = Step(model.train(), **INPUTS)
            with torch.no_grad():
                logits = model.eval()(input_ids=TOKENS).logits
            logs.append(Counter(self.log))
            found.append((step, logits))

        self.both(run)
        assert logs[0] == logs[1]
        found[0][0].assert_same(found[1][0], FACTOR)
        assert_close(found[0][1], found[1][1], torch.float32, "logits", FACTOR)

    ACTIONS = (
        [apply] * 3 + [kernelize] * 2 + [reset] * 2 + [pack] + [patch] * 2 + [replace, unpatch, unpatch, bind, hook, unhook, capture]
        + [freeze, checkpoint, copy, train, save_and_load, rebuild]
    )  # fmt: skip

    def go(self):
        self.compare()
        for _ in range(STEPS):
            action = self.random.choice(self.ACTIONS)
            self.done.append(action.__name__)
            try:
                action(self)
                self.compare()
            except Exception as error:
                error.add_note(f"after {', '.join(self.done)}; in place: {[place[1] for place, *_ in self.patches]}")
                raise

    def clean(self):
        while self.patches:
            self.unpatch()
        self.package.reset()
        for (owner, name), thing in self.plain.items():
            assert vars(owner)[name] is thing, f"{owner.__name__}.{name} is not back"
            assert not [name for name in vars(owner) if name.startswith("_bastile_")]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_walk(qwen3, tmp_path, seed):
    walk = Walk(qwen3, tmp_path, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what is kept
        before = dict(walk.plain)
        try:
            walk.go()
            walk.clean()
        finally:
            for (owner, name), thing in before.items():
                setattr(owner, name, thing)
                for mark in [mark for mark in vars(owner) if mark.startswith("_bastile_")]:
                    delattr(owner, mark)
    assert isinstance(walk.model, nn.Module)
