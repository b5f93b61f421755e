"""The part that knows transformers, and no model of it by name: what a package's layers do, putting them in place, and the optimizer."""
