"""Who computes attention, and which tokens see which."""
