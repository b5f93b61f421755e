"""The forwards of decoder layers, which are autograd nodes of `decoder`, and what of them is computed again."""
