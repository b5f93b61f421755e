"""One training run of the demo, in a process of its own: `python -m tools.demo_run '{...}'` (see `Run`).

Prints one JSON object a line: {"ready": ...} when the model is made, {"step", "loss", "seconds"} after each step, and at the
end {"peak_mib"}.
"""

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

SEED = 0


@dataclass(frozen=True)
class Run:
    """What to train. kernelized: with the package from the Hub that HF_ENDPOINT names. model: a local checkpoint, or None."""

    kernelized: bool
    device: str
    steps: int
    model: str | None = None


@dataclass(frozen=True)
class Size:
    """Sizes of the model that is made where there is no checkpoint, and of its batches.

    The vocabulary is larger than the 256 bytes of the text for the sake of the memory that the logits take: Qwen3's own has 151936.
    """

    dtype: torch.dtype
    learning_rate: float
    batch: int
    tokens: int
    config: dict


CPU = Size(
    torch.float32,
    1e-3,
    16,
    256,
    {
        "vocab_size": 8192,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
)
GPU = Size(
    torch.bfloat16,
    3e-4,
    8,
    1024,
    {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
)
CHECKPOINT_LEARNING_RATE = 1e-5


def text() -> str:
    """Python's language reference, which comes with Python; the sources of its library where it does not."""
    try:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    except ImportError:
        folder = Path(json.__file__).parents[1]
        return "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py")))


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


class Memory:
    """The peak above what was allocated at the start, on the GPU or of this process (Linux only; else None)."""

    STATUS = Path("/proc/self/status")

    def __init__(self, device: str):
        self.cuda = device.startswith("cuda")
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        elif self.STATUS.exists():
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
            self.start = self._peak_kib()

    def _peak_kib(self) -> int:
        return int(re.search(r"VmHWM:\s+(\d+) kB", self.STATUS.read_text())[1])

    def peak_mib(self) -> float | None:
        if self.cuda:
            return torch.cuda.max_memory_allocated() / 2**20
        return (self._peak_kib() - self.start) / 2**10 if self.STATUS.exists() else None


def say(**values) -> None:
    print(json.dumps(values), flush=True)


def train(run: Run) -> None:
    size = GPU if run.device.startswith("cuda") else CPU
    memory = Memory(run.device)
    model, ids = make_model(run, size)
    where = None
    if run.kernelized:
        from kernels import get_kernel

        qwen3 = get_kernel("bastile/qwen3", version=1, trust_remote_code=True)
        qwen3.kernelize(model)
        where = qwen3.__name__
    learning_rate = size.learning_rate if run.model is None else CHECKPOINT_LEARNING_RATE
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    say(ready=where, parameters=sum(p.numel() for p in model.parameters()), tokens=size.batch * size.tokens, text=len(ids))
    for step, batch in enumerate(batches(ids, size, run.steps)):
        batch = batch.to(run.device)
        start = time.perf_counter()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()  # waits for the GPU
        say(step=step, loss=value, seconds=time.perf_counter() - start)
    say(peak_mib=memory.peak_mib())


if __name__ == "__main__":
    train(Run(**json.loads(sys.argv[1])))
