"""Layers replayed as CUDA graphs in training."""
