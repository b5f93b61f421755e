"""Which models are served: the rows' form, the texts that transformers' releases have, and the forwards of a family's small parts."""
