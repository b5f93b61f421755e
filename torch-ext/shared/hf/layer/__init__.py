"""The forwards of decoder layers, which are autograd nodes of `decoder`, and what checkpoints recompute of them."""
