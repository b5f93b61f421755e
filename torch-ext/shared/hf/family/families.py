"""A model family of transformers as a row of a table, and which of its parts the layers of a package replace.

`Family` describes the decoder layer: the names of its parts and what they compute. A new family is one `Family`, and its layers
(`decoder_layers`) in its package; nothing else knows a family by name.
"""

from collections.abc import Mapping
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Type

from torch import nn

from ...decoder.router import SOFTMAX, Scores
from ..parts.explanation import Reason
from .accounted import Names
from .forwards import rotary_pos_emb
from .head import Head

__all__ = [
    "LOSS", "Families", "Family", "LayerNorms", "Mixer", "Scored", "Sparse", "Targets", "Vision", "head_of", "names_of",
]  # fmt: skip

LOSS = "fused_linear_cross_entropy"  # the operation of the class whose forward computes the loss


class LayerNorms(NamedTuple):
    """The attributes of a decoder layer that hold its norms, None where there is none: of the residual stream in front of attention; of
    attention's branch; in front of the MLP; of the MLP's branch."""

    inputs: Optional[str] = "input_layernorm"
    after: Optional[str] = None
    before: Optional[str] = "post_attention_layernorm"
    behind: Optional[str] = None


class Scored(NamedTuple):
    """How a router scores experts, but for what attributes of it hold when it runs. kind: the rest. groups: its attributes of the number of
    groups and of those that are chosen, () for none. factor, least: its attributes of these, "" for none. correction: the attributes that
    lead to that from the block, () for none. normalised: None for what norm_topk_prob of the router says, or true without that."""

    kind: Scores = SOFTMAX
    groups: Tuple[str, ...] = ()
    factor: str = ""
    least: str = ""
    correction: Tuple[str, ...] = ()
    normalised: Optional[bool] = None


class Sparse(NamedTuple):
    """A router and its experts in the MLP's place. classes: of the block, the router and the experts. router: the block's attribute.
    by_logits: whether experts are chosen by their logits, with the softmax over the chosen ones. shared: the block's attribute with the MLP
    that every token goes to, "" for none, or the layer's where the row has it `beside`; projections, act: that MLP's, as a row's `gate_up`,
    `down` and `act`; gated: whether it has a gate, of that name and "_gate". router_indices: whether the experts'
    forward calls the chosen experts so, and their weights routing_weights, instead of top_k_index and top_k_weights, and may be called
    without. scored: of the router."""

    classes: Tuple[str, str, str]
    router: str = "gate"
    by_logits: bool = False
    shared: str = ""
    router_indices: bool = False
    gated: bool = True
    scored: Scored = Scored()
    projections: Tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    act: str = "act_fn"


class Mixer(NamedTuple):
    """Describes a module that mixes a layer's tokens. name: the layer's attribute, a key of `explanation.MIXERS`. inputs: its projections
    of the normalised input. output: its last projection."""

    name: str
    inputs: Tuple[str, ...]
    output: str


class Vision(NamedTuple):
    """A model with a vision tower in front of the decoder.

    name: of its class. arguments: of its forward, in transformers' order; empty for those that Qwen's models have. capped: whether it
    scales and caps its logits as the causal LM does, instead of not at all; capped_since: the release since which it does, where it did
    not before. rest: what transformers 5.17 calls the forward's other keyword
    arguments. modeling: transformers' module of it, where that is not the family's: other families may then be behind the same tower.
    deepstack: whether the decoder adds visual features between its layers. former: what transformers 5.17 has instead of
    mm_encoder_outputs, "" for no such argument.
    """

    name: str
    arguments: Tuple[str, ...] = ()
    capped: bool = True
    capped_since: Tuple[int, ...] = ()
    rest: str = "kwargs"
    modeling: str = ""
    deepstack: bool = False
    former: str = ""


# The arguments of most decoder layers.
TAKES = "hidden_states", "attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings"


class Family(NamedTuple):
    """What a decoder layer of a family computes, and under which names.

    model: the family's name in messages. modeling: transformers' module. prefix: of its classes' names. norms, offset, rounds, centred: see
    `decoder.spec.Norm`. qk_norm: "none", "head" for a norm of each head of q and k, or "whole" for one of the whole projection. qkv,
    gate_up: the projections, several or a packed one. activation: as of `decoder.spec.Outputs`, in the attribute act, "" where a function
    of PyTorch is called instead. rotary: "halves" or "pairs". partial: whether the angles may be those of a part of a head. narrow: whether
    q and k keep their dtype where angles are wider, as they always are in such a family. turned: attention's attribute that switches the
    rotary embedding, or None for always. multiplier: the layer's attribute, of both branches. options: what attention is called with beside
    the scaling, each a name and the attributes that lead to its value. dropouts: the layer's attributes that hold a torch.nn.Dropout of a
    branch. sparse: of layers with experts. mlp: whether there are layers with an MLP. block, down: the layer's attribute that holds the MLP
    or the experts, and the MLP's last projection. absent: the layer's attributes, or paths of them with dots, that are missing, None or 0
    in a layer that is taken apart. norm_argument, mlp_argument: what the norms' and the MLP's forward call their input. takes: a decoder
    layer's arguments in transformers' order, by their names in transformers 5.17. decoder: the class of the decoder without its head, the
    prefix and "Model" by default. mixers: what may mix a layer's tokens instead of plain attention. divisor, softcap: attributes of the
    configuration, by which logits are divided, and that caps them. position_scale: the module's function that gives each position's factor
    of the queries after their rotary embedding, and the entries of the configuration's rope_parameters that it takes after the positions.
    whole: the model with a vision tower, where there is no causal LM of the decoder alone; towers: those models where there is one. routed:
    whether the causal LM's forward takes output_router_logits, and no use_cache, without a row for its experts. mlp_name: the MLP's class,
    the prefix and "MLP" by default. half_angles: whether cos and sin are half as wide as a head. called: the layer's attributes of
    attention, the MLP or norms where they compute what no row can say: they are called as the modules that they are, and the layer around
    them is fused. attention: the layer's attribute of attention; output, head_norms: its attributes of the last projection and of the norms
    of q and k. parallel: whether the MLP reads the layer's input, too, not what attention made of it. spread: whether the angles of
    neighbours are neighbours. gated: whether the MLP has a gate, without which gate_up is the one projection in front of the activation.
    turned_first: whether the norms of heads come after the rotary embedding. norm_name: the class of the norms behind the prefix, "" for
    torch.nn.LayerNorm. attention_dropout: attention's attribute of the probability with which it drops what it attends to, "" where it
    never does. weightless: of LayerNorms without a weight, the epsilon, which their class writes out. windowed: attention's attribute that
    says of a layer whether its sliding_window counts; where there is one, no other layer turns its heads. beside: the layer's attribute of
    an MLP that reads what the block of experts reads, and whose result is added to theirs.
    """

    model: str
    modeling: str
    prefix: str
    norms: LayerNorms = LayerNorms()
    offset: float = 0.0
    rounds: str = "first"
    qk_norm: str = "none"
    qkv: Tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: Tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "silu"
    act: str = "act_fn"
    rotary: str = "halves"
    partial: bool = False
    narrow: bool = False
    turned: Optional[str] = None
    multiplier: Optional[str] = None
    options: Tuple[Tuple[str, ...], ...] = ()
    dropouts: Tuple[str, ...] = ()
    sparse: Optional[Sparse] = None
    mlp: bool = True
    norm_argument: str = "hidden_states"
    mlp_argument: str = "x"
    takes: Tuple[str, ...] = TAKES
    decoder: str = ""
    mixers: Tuple[Mixer, ...] = ()
    divisor: Optional[str] = None
    softcap: Optional[str] = None
    position_scale: Tuple[str, ...] = ()
    whole: Optional[Vision] = None
    towers: Tuple[Vision, ...] = ()
    block: str = "mlp"
    down: str = "down_proj"
    absent: Tuple[str, ...] = ()
    routed: bool = False
    mlp_name: str = ""
    half_angles: bool = False
    called: Tuple[str, ...] = ()
    attention: str = "self_attn"
    output: str = "o_proj"
    head_norms: Tuple[str, ...] = ("q_norm", "k_norm")
    parallel: bool = False
    spread: bool = False
    gated: bool = True
    turned_first: bool = False
    centred: bool = False
    norm_name: str = "RMSNorm"
    attention_dropout: str = "attention_dropout"
    weightless: Optional[float] = None
    windowed: str = ""
    beside: str = ""

    def norm_class(self) -> str:
        """The class of the norms; "" where it is PyTorch's."""
        return self.norm_name and f"{self.prefix}{self.norm_name}"

    def of_positions(self) -> bool:
        """Whether transformers tells decoder layers and their masks the position_ids."""
        return "position_ids" in self.takes

    def causal_lm(self) -> str:
        """The class whose forward computes the loss."""
        return self.whole.name if self.whole else f"{self.prefix}ForCausalLM"

    def mlp_class(self) -> str:
        """The class of the MLP."""
        return self.mlp_name or f"{self.prefix}MLP"

    def classes(self) -> Tuple[str, ...]:
        """The classes whose forwards the fused decoder layer takes apart. What is called is not among them."""
        names = [self.norm_class()] if self.norm_name else []
        if "self_attn" not in self.called:
            names.append(f"{self.prefix}Attention")
        if self.mlp:
            names.append(self.mlp_class())
        return (*names, *(self.sparse.classes[:2] if self.sparse else ()))


def head_of(config, divisor: Optional[str], softcap: Optional[str]) -> Head:
    """The scaling and softcap that a configuration asks for; see `Family`. A text of another family, behind
    a tower that several have, may have no softcap."""
    scale = 1.0 if divisor is None else 1.0 / getattr(config, divisor)
    return Head(scale, None if softcap is None else getattr(config, softcap, None))


class Targets(NamedTuple):
    """Which layer of a package replaces which part of one model family of transformers.

    model: the family's name in messages. modeling: transformers' module of it. attention: its class whose forward calls the rotary
    embedding. classes: operation -> (class of that module, layer). rotary: the layer for the rotary embedding; rotate: its function.
    operations: the names of the arguments of `apply` that are for this family, in its order. losses: the operations of the classes whose
    forwards compute a loss; that of a model with a vision tower has the name of its class, and `LOSS` decides about it too. hub_names: the
    name that `kernels` knows a layer by -> layer. explain_layer: of a decoder layer and an input, [(part, None or why it is not fused)].
    fused: classes that the fused decoder layer takes apart, beside those that have a layer. optional: operations that a model of the
    family may have no module for. elsewhere: class -> module, of those that are not in `modeling`. accounted: class -> what its row knows
    that the forward reads. needs: the operations without which the fused decoder layer is off.
    """

    model: str
    modeling: str
    attention: str
    classes: Mapping[str, Tuple[str, Type[nn.Module]]]
    rotary: Type[nn.Module]
    operations: Tuple[str, ...]
    hub_names: Mapping[str, Type[nn.Module]]
    explain_layer: Callable[[nn.Module, Any], List[Tuple[str, Optional[Reason]]]]
    rotate: Callable = rotary_pos_emb
    losses: Tuple[str, ...] = (LOSS,)
    fused: Tuple[str, ...] = ()
    optional: Tuple[str, ...] = ()
    elsewhere: Mapping[str, str] = {}
    accounted: Mapping[str, Names] = {}
    needs: Tuple[str, ...] = ()

    def module_of(self, name: str) -> str:
        """transformers' module that defines a class or function of the family."""
        return self.elsewhere.get(name, self.modeling)

    def argument_of(self, operation: str) -> str:
        """The argument of `apply` that decides about an operation."""
        return LOSS if operation in self.losses else operation


Families = Sequence[Targets]  # of a package


def names_of(families: Families) -> str:
    """The families' names, for a message."""
    return " or ".join(targets.model for targets in families)
