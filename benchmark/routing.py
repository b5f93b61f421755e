"""Where the tokens of a mixture of experts go: weights that route them as wanted, and a record of where they went.

With every weight drawn alike, the layers of a random model drown what tells tokens apart, and deeper layers send all tokens to a few
experts: what attention averages is the same for all tokens, and each layer of Qwen3-30B-A3B more than doubles it. What that costs is no
property of any implementation. So the token embedding is drawn with a deviation of 1, and what branches add to the residual is made smaller
the more layers there are, as GPT-2 was initialised. That keeps tokens apart as trained models do, and the results say how many experts were
used and which share of the tokens the busiest one saw.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import NormalDist

import torch

UNIFORM, SKEWED = "uniform", "skewed"
EXPONENT = 0.5  # of "skewed": the n-th busiest expert gets a share of the tokens in proportion to n ** -EXPONENT
MOST = 0.45  # the largest share that an expert's logits can be drawn for: they are positive and negative alike
# What a row of "uniform" routing must show, or the table's check refuses it.
LEAST_USED, MOST_OF_FAIR = 0.9, 4.0


@dataclass(frozen=True)
class Routing:
    """What one forward pass did. experts, top_k: of a layer; used: experts that any token went to, in the layer where fewest were;
    largest: the share of the tokens that went to the busiest expert of any layer."""

    experts: int
    top_k: int
    used: int
    largest: float

    @property
    def fair(self) -> float:
        """The share of the tokens that each expert would get of equal ones."""
        return self.top_k / self.experts

    @classmethod
    def of(cls, chosen: Iterable[torch.Tensor], experts: int) -> "Routing":
        """Return the routing of all layers. chosen: [tokens, top-k] of each."""
        counts = [(torch.bincount(each.flatten(), minlength=experts), *each.shape) for each in chosen]
        used = min(int((count > 0).sum()) for count, *_ in counts)
        largest = max(count.max().item() / tokens for count, tokens, _ in counts)
        return cls(experts, counts[0][2], used, round(largest, 4))

    def asdict(self) -> dict:
        return asdict(self)


def branch_scale(layers: int) -> float:
    """Return the factor of the weights at the ends of a model's branches, of which each layer has two."""
    return (2 * layers) ** -0.5


def collapsed(kind: str, found: Routing) -> bool:
    """Tell whether tokens went to so few experts that the time says nothing of a trained model's."""
    if kind == SKEWED:
        return found.used < 0.5 * found.experts
    return found.used < LEAST_USED * found.experts or found.largest > MOST_OF_FAIR * found.fair


def experts_of(config) -> tuple[int, int]:
    """Return how many experts a layer of a model has and how many a token goes to; (0, 0) for a dense model."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
    return experts, config.num_experts_per_tok if experts else 0


def shares(experts: int, top_k: int) -> torch.Tensor:
    """Return the share of the tokens that each expert should get with "skewed" routing, busiest first; they add up to top_k."""
    law = torch.arange(1, experts + 1, dtype=torch.float64) ** -EXPONENT
    return (law * top_k / law.sum()).clamp(max=MOST)


def row_lengths(experts: int, top_k: int) -> torch.Tensor:
    """Return how long the router's row of each expert is for the shares of `shares`, relative to each other.

    Logits of one expert are normally distributed over the tokens, with a deviation in proportion to its row's length; a token goes to the
    experts whose logits are above a level that all experts share.
    """
    level = [1 / NormalDist().inv_cdf(1 - share) for share in shares(experts, top_k).tolist()]
    found = torch.tensor(level)
    generator = torch.Generator().manual_seed(experts)  # so that the busiest do not lie side by side
    return found[torch.randperm(experts, generator=generator)]


@torch.no_grad()
def record(model, **batch) -> Routing | None:
    """Return where a model routes a batch, in a forward pass of its own; None for a model without experts, or one whose routers are not
    called as modules."""
    experts, _ = experts_of(model.config.get_text_config())
    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")] if experts else []
    chosen: list[torch.Tensor] = []

    def keep(_module, _arguments, output) -> None:
        chosen.extend(part for part in output if not part.is_floating_point())

    hooks = [router.register_forward_hook(keep) for router in routers]
    try:
        if hooks:
            model(**batch, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return Routing.of(chosen, experts) if chosen else None
