"""`python -m <this package>`: what `report` finds."""

from .api import report

print(report())
