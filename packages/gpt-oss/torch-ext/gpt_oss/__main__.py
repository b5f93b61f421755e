"""`python -m <this package>`: what `report` finds; with --check, whether every operation's results are right on this GPU."""

from . import report
from .shared.hf.say.doctor import main

main(report, __package__)
