"""A decoder layer whose tokens are mixed by a gated delta net, or by attention with a gate: the norm and the mixer's projections are one
node, its last projection is in the node of the MLP or the experts, and what is between them has operations of its own.

| mixer                            | projections                    | what runs                                        |
|----------------------------------|--------------------------------|--------------------------------------------------|
| ours                             | linear layers, LoRA, four bits | the node, the mixer's operations, the last node  |
| ours                             | anything else                  | the norm, the modules, the mixer's operations    |
| hooked, or of another cache, ... |                                | the norm, and the mixer as the module that it is |
"""

import sys
from typing import List, Optional, Tuple

import torch
from torch import nn

from ...decoder.nodes import product_dtype
from ...decoder.norm_projections import norm_projections
from ...decoder.norms import rms_norm
from ...ops.autograd import autocasts
from ..family.arguments import CACHE, NET_CACHE
from ..family.families import Mixer
from ..parts.adapters import projections
from ..parts.explanation import MIXERS, Reason
from ..parts.modules import is_marked, own_forward
from ..parts.weights import eps_of, weight_of
from . import gated_attention
from .decoder_layer import FusedLayer, Mixed
from .delta_net import MASK, NET, documents_of, is_before_5_21, mixed_tokens, why_not_ours
from .fusable import Groups

__all__ = ["MixedLayer"]


class MixedLayer(FusedLayer):
    """A row of the table whose layers have a delta net, or attention with a gate."""

    def mixer_of(self, layer) -> Tuple[Mixer, nn.Module]:
        """The mixer that a layer has, with its module."""
        parts = layer.__dict__["_modules"]
        return next((mixer, parts[mixer.name]) for mixer in self.family.mixers if mixer.name in parts)

    def why_called(self, mixer: Mixer, module, x) -> Optional[Reason]:
        """Why a mixer is called as the module that it is, for an input x of the layer; None where its parts run apart."""
        if mixer.name != NET:
            return gated_attention.why_not_fused(self, module, x)
        text = why_not_ours(module) or ("" if is_marked(own_forward(module)) else "its forward is transformers' own, or hooked")
        return Reason("called", text) if text else None

    def mix(self, layer, x, attention_mask, cache, position_embeddings, kwargs) -> Mixed:
        """Runs the layer's mixer on x."""
        mixer, module = self.mixer_of(layer)
        is_net = mixer.name == NET
        norm, x = layer.__dict__["_modules"][self.family.norms.inputs], x.contiguous()
        called = self.why_called(mixer, module, x) is not None
        if is_net:
            kwargs = {name: value for name, value in kwargs.items() if name != "position_ids"}
            called = called or is_before_5_21(cache)
        else:
            called = called or position_embeddings[0].dtype != x.dtype
        if called:
            normed = rms_norm(self.norm(eps_of(norm)), x, weight_of(norm))
            if is_net:
                return Mixed(module(hidden_states=normed, **{NET_CACHE: cache}, attention_mask=attention_mask, **kwargs), None, x)
            more = {"attention_mask": attention_mask, CACHE: cache, "position_embeddings": position_embeddings}
            return Mixed(module(hidden_states=normed, **more, **kwargs)[0], None, x)
        output = module.__dict__["_modules"][mixer.output]
        if not is_net:
            projected, residual = self.projected(mixer, module, norm, x)
            of_model = attention_mask, cache, position_embeddings, kwargs
            return Mixed(gated_attention.gated_attention(self, module, projected, x.shape, *of_model), output, residual)
        documents = documents_of(kwargs, cache, x.shape[0])
        projected, residual = self.projected(mixer, module, norm, x, attention_mask)
        return Mixed(mixed_tokens(module, projected, x.shape, cache, documents), output, residual)

    def projected(self, mixer: Mixer, module, norm, x, factors=None) -> Tuple[List[torch.Tensor], torch.Tensor]:
        """The mixer's projections of the normalised x [batch, tokens, hidden], and x for the residual connection. factors: [batch, tokens]
        or None, numbers by which transformers multiplies the normalised x: zeros for padding, and whatever else a mask holds."""
        parts = module.__dict__["_modules"]
        linears = [parts[name] for name in mixer.inputs]
        dtype, wider, spec = product_dtype(x), autocasts(x.device), self.norm(eps_of(norm))
        found = projections(linears, dtype, wider)
        biased = found is not None and any(each.bias is not None or each.adapter_bias is not None for each in found)
        if found is None or (biased and factors is not None):
            normed = rms_norm(spec, x, weight_of(norm))
            normed = normed if factors is None else getattr(sys.modules[self.modeling], MASK)(normed, factors)
            return [linear(normed) for linear in linears], x
        *results, residual = norm_projections(x, weight_of(norm), found, spec, dtype)
        if factors is not None:  # without a bias, factors of the results are those of the input
            results = [getattr(sys.modules[self.modeling], MASK)(result, factors) for result in results]
        return results, residual

    def projection_groups(self, layer, x) -> Groups:
        """Groups the mixer's projections as `FusedLayer` does attention's; returns none where the mixer is called as a module."""
        mixer, module = self.mixer_of(layer)
        if self.why_called(mixer, module, x) is not None:
            return []
        parts = module.__dict__["_modules"]
        inputs = f"norm, {', '.join(mixer.inputs)}", {name: parts[name] for name in mixer.inputs}
        return [inputs, (mixer.output, {mixer.output: parts[mixer.output]})]

    def explain(self, layer, x) -> List[Tuple[str, Optional[Reason]]]:
        """Explains what `FusedLayer` does, with what is said of the mixer first."""
        mixer, module = self.mixer_of(layer)
        return [(MIXERS[mixer.name], self.why_called(mixer, module, x)), *super().explain(layer, x)]
