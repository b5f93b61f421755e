"""A frozen embedding whose table stays in the host's memory: a step reads the rows of its tokens alone.

The table is no parameter, so that no move of a model takes it along, `model.device` is that of the layers, and DDP and FSDP2 leave it
alone. A state dict has it as `weight`, as an embedding's. What would train it asks for its parameters, and is refused (`Frozen`).
"""

from typing import Iterator, List, Optional, Tuple

import torch
from torch import nn

from ...ops.arguments import describe, fail
from .explanation import Reason
from .weights import held, is_plain, need_frozen

__all__ = ["HostEmbedding", "explain_embeddings", "host_embeddings"]

ROWS = 4096  # looked up and copied at once


class Frozen(torch.Tensor):
    """Stands for the table where someone asks for the parameters of the embedding itself, to train it (PEFT's `modules_to_save`)."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return False

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        if wanted:
            advice = "a frozen one: load the model again, and train it without host_embeddings(model)"
            fail("the embedding in the host's memory", "to be trained (requires_grad)", advice)

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        self.requires_grad = requires_grad
        return self


class HostEmbedding(nn.Module):
    """A torch.nn.Embedding whose table [tokens, features] is in the host's memory, as `host_embeddings` makes it."""

    home: torch.Tensor  # [0], of the dtype and on the device of what a call returns
    table: torch.Tensor

    @classmethod
    def take(cls, embedding: nn.Embedding) -> None:
        """Makes a torch.nn.Embedding one of these, in place, which frees its weight on the device."""
        weight = embedding._parameters.pop("weight")
        assert weight is not None
        embedding.__class__ = cls  # type: ignore[assignment]
        vars(embedding).update(home=torch.empty((0,), dtype=weight.dtype, device=weight.device), table=weight.detach().to("cpu"))

    @property
    def weight(self) -> torch.Tensor:
        return self.table

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields an empty stand-in for the table that refuses to be trained. The `parameters` of a whole model never calls this."""
        yield self.home.as_subclass(Frozen)  # type: ignore[misc]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = ids.to("cpu")  # which waits for a device that has them
        if torch.compiler.is_compiling():
            return nn.functional.embedding(rows, self.table).to(self.home)
        found = torch.empty((*ids.shape, self.table.shape[1]), dtype=self.home.dtype, device=self.home.device)
        flat = rows.flatten()
        for place, part in zip(found.view(-1, found.shape[-1]).split(ROWS), flat.split(ROWS) if flat.numel() else ()):
            place.copy_(self.table.index_select(0, part))
        return found

    def extra_repr(self) -> str:
        return f"{self.table.shape[0]}, {self.table.shape[1]}, in the host's memory"

    def _apply(self, fn, recurse=True):
        vars(self)["home"] = fn(self.home)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.table

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        found = dict(state_dict)
        weight = found.pop(f"{prefix}weight", None)
        super()._load_from_state_dict(found, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if weight is None:
            missing_keys.append(f"{prefix}weight")
        elif weight.shape != self.table.shape:
            error_msgs.append(f"{prefix}weight is {describe(weight)}, expected {list(self.table.shape)}")
        else:
            self.table.copy_(weight.detach())
            if self.home.is_meta and local_metadata.get("assign_to_params_buffers", False):  # no parameter is on meta any more
                vars(self)["home"] = torch.empty((0,), dtype=self.home.dtype, device=weight.device)


def host_embeddings(model: nn.Module) -> nn.Module:
    """Keeps the embedding of a model's tokens in the host's memory; see `host_embeddings` of a package."""
    from transformers import PreTrainedModel

    owner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    embedding = None if owner is None else owner.get_input_embeddings()
    if embedding is None:
        fail("model", f"a {type(model).__name__}", "a model of transformers with an embedding of tokens", TypeError)
    if isinstance(embedding, HostEmbedding):
        return model
    name = next(name for name, module in model.named_modules() if module is embedding)
    if type(embedding) is not nn.Embedding or "forward" in vars(embedding) or embedding.max_norm is not None:
        found = f"a {type(embedding).__name__} with more than a look-up"
        fail(name, found, "a torch.nn.Embedding, without adapters, max_norm or another forward")
    weight = held(embedding, "weight")
    if not is_plain(weight):
        fail(f"{name}.weight", f"a {type(weight).__name__}", "an ordinary parameter, whole on its device")
    need_frozen(f"{name}.weight", weight, "a frozen one", "a table with numbers")
    others = [other for other, each in model.named_parameters(remove_duplicate=False) if each is weight and other != f"{name}.weight"]
    if others:
        fail(f"{name}.weight", f"tied to {others[0]}, which is read whole in every step", "an embedding of its own")
    HostEmbedding.take(embedding)  # type: ignore[arg-type]
    return model


def explain_embeddings(model: nn.Module) -> List[Tuple[str, Optional[Reason]]]:
    """[(which embeddings are in the host's memory, and what that saves on the device, None)]."""
    found = [module for module in model.modules() if isinstance(module, HostEmbedding)]
    return [(f"embedding in the host's memory, {each.table.numel() * each.home.itemsize / 2**20:.1f} MiB saved", None) for each in found]
