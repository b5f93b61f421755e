"""Puts layers where they go: on classes, on one model, or into the Hub's mapping."""
