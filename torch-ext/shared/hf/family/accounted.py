"""Which attributes the forwards of a family read of their modules, by their text, and which of them a row of the table accounts for. A
fused layer that does not know of an attribute would silently leave out what the family computes with it.
"""

import ast
from typing import Any, Dict, FrozenSet, Iterator, Mapping, Set, Tuple

__all__ = ["LAYER_NORM", "ROUTER", "Names", "accounted", "reads", "unaccounted"]

Names = FrozenSet[str]
MODULE = "self"  # stands for a module that its forward gives to a function, which may read anything of it

# What the layers compute with in every family.
NORM = {"weight", "variance_epsilon", "eps", "_norm"}
LAYER_NORM = {*NORM, "bias", "normalized_shape"}
ATTENTION = {"o_proj", "head_dim", "scaling", "training", "layer_idx", "config._attn_implementation", MODULE}
PACKED = {"config.num_attention_heads", "config.num_key_value_heads", "num_key_value_heads"}  # a packed projection's rows follow from them
ROUTER = {"weight", "top_k", "norm_topk_prob", "hidden_dim", "num_experts"}
BLOCK = {"experts", "input_size"}
EXPERTS = {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias", "act_fn", "num_experts", "_apply_gate", "alpha", "limit"}
CAUSAL_LM = {"model", "lm_head", "loss_function", "vocab_size", "config.vocab_size"}
ROUTING_LOSS = {"router_aux_loss_coef", "num_experts", "num_experts_per_tok", "output_router_logits"}
DELTA_NET = {
    "out_proj", "norm", "conv1d", "conv_kernel_size", "activation", "dt_bias", "A_log", "num_k_heads", "num_v_heads", "head_k_dim",
    "head_v_dim", "key_dim", "value_dim", "layer_idx", "fix_query_key_value_ordering",
}  # fmt: skip
GATED_NORM = {"weight", "variance_epsilon", "activation"}
LOOK_UPS = "getattr", "hasattr"
OF_A_PART = {"weight", "bias", "float", "squeeze", "get", "dtype", "to"}  # what may be read of a parameter, a submodule or a dictionary


def accounted(family) -> Dict[str, Names]:
    """Lists, by class, the attributes that a row (`families.Family`) accounts for in the forwards that its layers stand in for."""
    prefix, sparse, mixers = family.prefix, family.sparse, family.mixers
    options = {f"config.{path[1]}" if path[0] == "config" else path[0] for _, *path in family.options}
    attention = {*ATTENTION, family.attention_dropout, *family.qkv, *options, family.turned, family.windowed}
    attention |= PACKED if len(family.qkv) == 1 else set()
    attention |= {*family.head_norms} if mixers or family.qk_norm != "none" else set()
    attention |= {"config.rope_parameters"} if family.position_scale else set()
    absent = {path.partition(".")[::2] for path in family.absent}  # (the layer's attribute, a path below it)
    attention |= {path for name, path in absent if name == "self_attn"}
    layer = {"self_attn", family.block, *family.norms, family.multiplier, *family.dropouts, *(name for name, _ in absent)}
    layer |= {"has_experts"} if family.absent else set()
    layer |= {*(mixer.name for mixer in mixers), "block_type", "layer_type"} if mixers else set()
    head = {*CAUSAL_LM, f"config.{family.divisor}"}
    head |= {*ROUTING_LOSS, *(f"config.{name}" for name in ROUTING_LOSS)} if sparse or family.routed else set()
    cap = f"config.{family.softcap}"
    found: Dict[str, Any] = {family.norm_class(): LAYER_NORM if family.centred else NORM} if family.norm_name else {}
    found.update({f"{prefix}Attention": attention, f"{prefix}DecoderLayer": layer, family.causal_lm(): {*head, cap}})
    found.update({tower.name: {*head, cap} if tower.capped or tower.capped_since else head for tower in family.towers})
    for name in (f"{prefix}Attention",) if "self_attn" in family.called else ():
        del found[name]
    if family.mlp:
        dropped = {path for name, path in absent if name == family.block and not sparse}  # its own dropout
        found[family.mlp_class()] = {*family.gate_up, family.down, family.act, *dropped, *(("training",) if dropped else ())}
    if sparse:
        shared = {sparse.shared, f"{sparse.shared}_gate"} if sparse.shared else set()
        of_router = ROUTER | ({"bias"} if sparse.by_logits else set())
        noise = {path for name, path in absent if name == family.block}  # in training
        of_block = {*BLOCK, sparse.router, *shared, *noise, *(("training",) if noise else ())}
        found.update(zip(sparse.classes, (of_block, of_router, EXPERTS)))
    if mixers:
        found[f"{prefix}GatedDeltaNet"] = {*DELTA_NET, *(name for mixer in mixers for name in mixer.inputs)}
        found[f"{prefix}RMSNormGated"] = GATED_NORM
    return {name: frozenset(filter(None, names)) for name, names in found.items()}


def reads(tree: ast.Module, name: str) -> Names:
    """What the forward of a class reads of its module, with the methods of the class that it calls: names of attributes; of the
    configuration "config.x", also of its text's; of a submodule "gate.x", but for `OF_A_PART`; and `MODULE`."""
    cls = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    methods = {node.name: node for node in (cls.body if cls else ()) if isinstance(node, ast.FunctionDef) and node.args.args}
    found: Dict[str, None] = {}
    called = ["forward"]
    for method in called:
        if method in methods:
            more = dict.fromkeys(map(_named, _paths(methods[method])))
            called += [each for each in more if each in methods and each not in called]
            found.update(more)
    return frozenset(found)


def _paths(method: ast.FunctionDef) -> Iterator[Tuple[str, ...]]:
    """The paths of attributes that a method reads of `self`, each as long as it is written."""
    me = method.args.args[0].arg
    inner: Set[int] = set()
    for node in ast.walk(method):  # the outer ones first
        if id(node) in inner:
            continue
        path, start, passed = _path(node)
        if isinstance(start, ast.Name) and start.id == me and not isinstance(getattr(node, "ctx", None), ast.Store):
            yield path
        inner.update(map(id, passed))


def _path(node: Any) -> Tuple[Tuple[str, ...], Any, list]:
    """(names, what they are of, the nodes passed) of an expression such as self.config.x or getattr(self.config, "x", None)."""
    names: list = []
    passed = [node]
    while True:
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        elif getattr(getattr(node, "func", None), "id", "") in LOOK_UPS and isinstance(node.args[1], ast.Constant):
            names.append(node.args[1].value)
            node = node.args[0]
        elif getattr(getattr(node, "func", None), "attr", "") == "get_text_config":
            names.append("text_config")
            passed.append(node.func)
            node = node.func.value
        else:
            return tuple(reversed(names)), node, passed
        passed.append(node)


def _named(path: Tuple[str, ...]) -> str:
    if not path:
        return MODULE
    if path[:2] == ("config", "text_config"):
        path = ("config", *path[2:])
    kept = 2 if path[0] == "config" else 1
    return ".".join(path[:kept] if OF_A_PART.issuperset(path[kept:]) else path)


def unaccounted(found: Mapping[str, Names], known: Mapping[str, Names]) -> Dict[str, Tuple[str, ...]]:
    """Lists, by class, what its forward reads and the row does not account for. found: of `reads`; known: of `accounted`."""
    left = {name: tuple(sorted(found[name] - names)) for name, names in known.items() if name in found}
    return {name: names for name, names in left.items() if names}
