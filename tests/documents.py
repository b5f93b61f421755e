"""What README.md, docs/*.md and CARD.md contain: their text, their blocks and their commands."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CARD = (ROOT / "CARD.md").read_text()
# The README and what it leads to: what is said is said in one of them.
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
README = PAGES["README.md"]
DOCUMENTS = PAGES | {"CARD.md": CARD}
INTEGRATIONS, NOTEBOOK = "docs/integrations.md", "examples/finetune.ipynb"
SOURCES = ROOT / "torch-ext" / "qwen3"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def python_blocks() -> dict[str, str]:
    """By document and number. A block that takes `qwen3` as given has in front what loads it in the README's first block."""
    first = "".join(line for line in blocks(README, "python")[0].splitlines(True) if not line.startswith("qwen3."))
    found = {}
    for name, text in DOCUMENTS.items():
        for number, block in enumerate(blocks(text, "python"), 1):
            needs_it = re.search(r"\bqwen3\.", block) and "get_kernel" not in block
            found[f"{name}-{number}"] = first + block if needs_it else block
    return found


PYTHON = python_blocks()


def commands() -> list[str]:
    """Every line of a shell block, and every `make ...` and `python ...` within the text."""
    found = []
    for text in DOCUMENTS.values():
        for block in blocks(text, "bash"):
            found += [line for line in block.splitlines() if line and not line.startswith("#")]
        found += re.findall(r"`((?:make|python) [^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return list(dict.fromkeys(found))


COMMANDS = commands()
MAKE = [command for command in COMMANDS if re.match(r"([A-Z_]+=\S+ )*make ", command)]
MODULES = [command for command in COMMANDS if command.startswith("python -m ")]


def cells(kind: str) -> list[str]:
    """The sources of the notebook's cells of a kind."""
    return ["".join(cell["source"]) for cell in json.loads((ROOT / NOTEBOOK).read_text())["cells"] if cell["cell_type"] == kind]
