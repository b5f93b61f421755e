"""One training run of the demo, in a process of its own: `python -m tools.demo_run '{...}'` (see `Run`).

Prints what there is of its `Result` as JSON, a line when the model is made, one after each step, and one at the end.
"""

import json
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pydoc_data.topics import topics
from typing import NamedTuple

import torch

SEED = 0


@dataclass(frozen=True)
class Run:
    """What to train. kernelized: with the package from the Hub that HF_ENDPOINT names. model: a local checkpoint, or None."""

    kernelized: bool
    device: str
    steps: int
    model: str | None = None


@dataclass
class Result:
    """The result of a run. kernel: name of the loaded package; tokens: in a step; peak_mib: peak memory minus the memory at the start."""

    kernel: str | None = None
    parameters: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_mib: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Returns the median step's; the first one, which loads and warms up, is skipped where there are others."""
        return self.tokens / statistics.median(self.seconds[1:] or self.seconds)

    def say(self) -> None:
        print(json.dumps(asdict(self)), flush=True)


class Size(NamedTuple):
    """The model that is made where there is no checkpoint, as options of a Qwen3Config, and its batches.

    The vocabulary is larger than the 256 bytes of the text for the sake of the memory that the logits take: Qwen3's own has 151936.
    """

    dtype: torch.dtype
    learning_rate: float
    batch: int
    tokens: int
    config: dict


CPU = Size(torch.float32, 1e-3, 16, 256, {
    "vocab_size": 8192, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
})  # fmt: skip
GPU = Size(torch.bfloat16, 3e-4, 8, 1024, {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
})  # fmt: skip
CHECKPOINT_LEARNING_RATE = 1e-5


def text() -> str:
    """Python's language reference, which comes with Python."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def make_model(run: Run, size: Size):
    """(model, the text as token ids)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    if run.model is None:
        model = Qwen3ForCausalLM(Qwen3Config(**size.config, tie_word_embeddings=True))
        ids = list(text().encode())
    else:
        model = AutoModelForCausalLM.from_pretrained(run.model, local_files_only=True)
        if model.config.model_type != "qwen3":
            raise SystemExit(f"--model: {run.model} is a checkpoint of {model.config.model_type!r}, expected 'qwen3'")
        tokenizer = AutoTokenizer.from_pretrained(run.model, local_files_only=True)
        ids = tokenizer(text(), verbose=False).input_ids
    return model.to(device=run.device, dtype=size.dtype).train(), torch.tensor(ids)


def batches(ids: torch.Tensor, size: Size, steps: int):
    """Yields random pieces of the text, the same ones in every run."""
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - size.tokens, (size.batch,), generator=generator)
        yield torch.stack([ids[start : start + size.tokens] for start in starts])


def peak_mib(device: str) -> float:
    """Returns the most memory that was in use so far, on the GPU or of this process."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def train(run: Run) -> None:
    size = GPU if run.device.startswith("cuda") else CPU
    start_mib = peak_mib(run.device)
    model, ids = make_model(run, size)
    result = Result(parameters=sum(p.numel() for p in model.parameters()), tokens=size.batch * size.tokens)
    if run.kernelized:
        from kernels import get_kernel

        qwen3 = get_kernel("bastile/qwen3", version=1, trust_remote_code=True)
        qwen3.kernelize(model)
        result.kernel = qwen3.__name__
    learning_rate = size.learning_rate if run.model is None else CHECKPOINT_LEARNING_RATE
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    result.say()
    for batch in batches(ids, size, run.steps):
        batch = batch.to(run.device)
        start = time.perf_counter()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(loss.item())  # waits for the GPU
        result.seconds.append(time.perf_counter() - start)
        result.say()
    result.peak_mib = peak_mib(run.device) - start_mib
    result.say()


if __name__ == "__main__":
    train(Run(**json.loads(sys.argv[1])))
