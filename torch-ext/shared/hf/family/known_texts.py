"""The tested releases of transformers, and the texts that these have of each function that the layers stand in for or rely on: the first
release with a text, and its fingerprint (see `fingerprint`). `python -m tools.transformers_texts` writes them into known_texts.json."""

import json
from pathlib import Path
from typing import Dict, Tuple

__all__ = ["TESTED", "TEXTS"]

_known = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
TESTED: Tuple[str, ...] = tuple(_known["tested"])
TEXTS: Dict[str, Dict[str, Dict[str, str]]] = _known["texts"]
