"""The evidence: how fast Bastile is, beside everyone else and beside what the machine can do. `python -m benchmark --help`."""
