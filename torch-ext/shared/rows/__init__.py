"""The model families, a row each, and what is served together: a package of the Hub is one of these files and a list of kernels."""
