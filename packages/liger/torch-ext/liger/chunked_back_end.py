"""Makes Liger's chunked losses run on those of this package: `use_in_liger` takes them over, `restore_liger` gives them back.

Liger's modules (`LigerFusedLinearDPOLoss`) look up their autograd function when they are called, in the file that defines both, so setting
that name there reaches every module, made before or after. Beside it the name is in `liger_kernel.chunked_loss.functional`, with the
function's `apply`.
"""

import importlib
import sys
from typing import Callable, Dict, List, Tuple

from .chunked_loss import FUNCTIONS

PACKAGE = "liger_kernel.chunked_loss"
TAKEN = "_bastile_takes"  # on Liger's package: by file, Liger's own function


def take(fits: Callable) -> Tuple[List[str], List[str], bool]:
    """(names that are taken over, names that are missing or take other arguments, whether anything was changed). fits: called with Liger's
    function and ours, tells whether ours takes whatever Liger's takes."""
    names = {file: f"chunked_loss.{function.__name__}" for file, function in FUNCTIONS.items()}
    try:
        package = importlib.import_module(PACKAGE)
        importlib.import_module(f"{PACKAGE}.functional")
    except ImportError:
        return [], list(names.values()), False
    taken = dict(vars(package).get(TAKEN, {}))
    missing, changed = [], 0
    for file, ours in FUNCTIONS.items():
        theirs = taken.get(file) or vars(sys.modules.get(f"{PACKAGE}.{file}", package)).get(ours.__name__)
        if theirs is None or not fits(theirs, ours):
            missing.append(names[file])
            continue
        taken[file] = theirs
        changed += _set(file, ours)
    setattr(package, TAKEN, taken)
    return [names[file] for file in taken], missing, changed > 0


def give_back() -> None:
    package = sys.modules.get(PACKAGE)
    for file, theirs in (vars(package).pop(TAKEN, {}) if package is not None else {}).items():
        _set(file, theirs)


def _set(file: str, function) -> int:
    """Puts a function where Liger has one. Returns in how many places there was another."""
    held: Dict[str, Callable] = vars(sys.modules[f"{PACKAGE}.{file}"])
    functional, name = vars(sys.modules[f"{PACKAGE}.functional"]), function.__name__
    changed = held[name] is not function
    held[name] = functional[name] = function
    # Liger's is called by the loss's short name.
    functional[f"liger_fused_linear_{file.replace('_similarity', '')[: -len('_loss')]}"] = function.apply
    return int(changed)
