"""attn_implementation="bastile": the operation `attention` among transformers' attention functions, with a mask function of its own.

What no plan can say (padding between tokens, overlays of other models, keys of an earlier call, dropout, other head sizes) goes to
SDPA, or to the model's own eager attention where there are sinks, with the mask that transformers makes for these.
"""

import torch

from ...ops.attention import attention, takes_dtype, takes_heads
from ...ops.attention_products import Reach, attention_by_products, wants_products
from ...ops.autocast import as_autocast, without_autocast
from ...ops.autograd import autocasts
from ...runtime.device import kernels_run_on
from ..parts.modules import beside_class
from ..parts.weights import is_plain
from .defaults import exchange_of, exchanges, is_around_ours, is_eager, sdpa_of_transformers
from .exchange import attend_in_whole_rows
from .masks import Visible, is_chosen, is_visible

__all__ = ["attention_forward", "documents_of"]


def _says(q, k, v, sinks, dropout, kwargs) -> bool:
    """True where `attention` does what these arguments ask for."""
    asked = any(kwargs.get(name) is not None for name in ("position_bias", "cache")) or kwargs.get("output_attentions")
    if sinks is not None and not is_plain(sinks):  # sharded
        return False
    if dropout or asked or k.shape != v.shape or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        return False
    return autocasts(q.device) or q.dtype == k.dtype == v.dtype


def _takes(q, k, v, sinks, dropout, kwargs) -> bool:
    """True where `attention` does what these arguments ask for, in its kernels if they lie on a GPU."""
    if not _says(q, k, v, sinks, dropout, kwargs):
        return False
    if q.device.type == "cpu":
        return True
    dtype, capped = torch.get_autocast_dtype(q.device.type) if autocasts(q.device) else q.dtype, kwargs.get("softcap") is not None
    fits = q.is_cuda and takes_dtype(dtype, capped) and takes_heads(q.shape[3], sinks is not None, capped)
    return fits and (torch.compiler.is_compiling() or kernels_run_on(q, k, v))


def attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, s_aux=None, **kwargs):
    """transformers' attention function of ours. query, key, value: [batch, heads, tokens, head_dim] of any strides; s_aux: sinks
    [heads]. Returns ([batch, tokens, heads, head_dim], None).

    Documents are those of cu_seq_lens_q, if the caller gave it; else those that transformers found in position_ids for the mask; where
    there are sinks, which no mask of transformers' can part, also those that start where position_ids do not go on. Where DeepSpeed's
    Ulysses is in force, `attend_in_whole_rows` runs.
    """
    visible, config = attention_mask, getattr(module, "config", None)
    if s_aux is not None and is_chosen(config) and not (is_eager(config) and hasattr(module, "sinks")):
        s_aux = None  # an argument of the model's call, which the function in whose place ours is does not know
    if not isinstance(visible, Visible):
        if is_visible(visible):  # of another loaded package, which has the kernels for it
            return visible.attend(module, query, key, value, visible, scaling, dropout, s_aux, **kwargs)
        exchange = exchange_of(config)  # None in a graph, and where dynamo traces this one function of a frame that it left
        if config is not None and is_around_ours(config) and (exchange is None or exchanges(exchange, module)):
            why = "inside torch.compile, or with a mask of one's own"
            raise ValueError(f'DeepSpeed has dropped the mask that attention of Bastile needs, {why}. Register "sdpa" with it')
        return _as_transformers(module, query, key, value, visible, scaling, dropout, s_aux, kwargs)
    if exchanges(visible.exchange, module):
        said = _says(query, key, value, s_aux, dropout, kwargs)
        return attend_in_whole_rows(visible, module, query, key, value, scaling, dropout, s_aux, kwargs, said)
    tokens = visible.tokens
    usable = visible.rule is not None and query.shape[2] == tokens and key.shape[2] == visible.keys
    softcap = kwargs.get("softcap")  # which SDPA does not have, whatever the mask is
    if usable and _takes(query, key, value, s_aux, dropout, kwargs):
        cu_seqlens, position_ids = documents_of(visible, kwargs, s_aux)
        if s_aux is not None or softcap is not None or cu_seqlens is not None or not visible.is_plain():
            if key.shape[2] > tokens:  # a static cache, with room for what comes
                key, value = key[:, :, :tokens], value[:, :, :tokens]
            plan = visible.plan(query.device, cu_seqlens, position_ids)
            options = {"sinks": s_aux, "scale": scaling, "softcap": softcap}
            return attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), plan, **options), None
    elif usable and s_aux is None and softcap is None and key.shape[2] == tokens and _multiplies(query, key, value, dropout, kwargs):
        return _by_products(visible, query, key, value, scaling, kwargs), None
    return _as_transformers(module, query, key, value, visible, scaling, dropout, s_aux, kwargs)


Visible.attend = staticmethod(attention_forward)


def _multiplies(q, k, v, dropout, kwargs) -> bool:
    """True where no kernel computes attention, and matrix products do it faster than SDPA."""
    return not torch.compiler.is_compiling() and wants_products(q) and _says(q, k, v, None, dropout, kwargs)


def _by_products(visible, query, key, value, scaling, kwargs):
    """Attention of `attention_by_products`: [batch, tokens, heads, head_dim]."""
    cu_seqlens, position_ids = documents_of(visible, kwargs, None)
    alone = visible.is_plain() and cu_seqlens is None and position_ids is None
    plan, reach = visible.plan(query.device, cu_seqlens, position_ids), Reach(query.shape[0], alone)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if autocasts(query.device):
        q, k, v = as_autocast(query.device, q, k, v)
    with without_autocast(query.device):
        return attention_by_products(q, k, v, plan, reach, scaling).unflatten(0, (query.shape[0], -1))


def documents_of(visible, kwargs, sinks):
    """(cu_seqlens, position_ids) of a call, None where the mask has said what documents there are. cu_seqlens are read for the plan, which
    waits for the device: a decoder that a package knows has read them before, once a pass, and says them with the mask."""
    cu_seqlens, position_ids = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    if visible.padding is not None or visible.documents is not None or visible.rule.packed is not None:
        return None, None
    if cu_seqlens is not None:
        return cu_seqlens, None
    asked = visible.positions or sinks is not None
    return None, position_ids if asked and position_ids is not None and position_ids.dim() == 2 else None


def _as_transformers(module, query, key, value, mask, scaling, dropout, sinks, kwargs):
    """SDPA's function of transformers, or with sinks or a softcap the eager one of the module's own model. mask: a `Visible` or what
    transformers made."""
    averages = isinstance(mask, Visible) and mask.rule is None and mask.averages
    kind = "sdpa" if sinks is None and kwargs.get("softcap") is None and not averages else "eager"
    if isinstance(mask, Visible):
        # SDPA needs no mask there: what transformers knows too, but not inside a graph.
        causal = kind == "sdpa" and mask.is_plain()
        needless = causal and query.shape[2] == key.shape[2] == mask.keys
        if causal and is_eager(getattr(module, "config", None)):  # eager attention heeds its mask, whatever the module's is_causal says
            kwargs = {**kwargs, "is_causal": True}
        mask = None if needless else mask.mask(kind, query.dtype, query.device)
    if kind == "sdpa":
        return sdpa_of_transformers()(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=query.dtype, device=mask.device), torch.finfo(query.dtype).min)
    function = beside_class(module, "eager_attention_forward")
    more = kwargs if sinks is None else {**kwargs, "s_aux": sinks}
    return function(module, query, key, value, mask, dropout=dropout, scaling=scaling, **more)
