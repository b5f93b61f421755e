"""Finds, checks, loads and launches the prebuilt kernels. Needs torch and the standard library."""
