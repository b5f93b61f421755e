"""The decoder layer, written once: a description, its projections, and the two autograd nodes around attention."""
