"""Training: the recipe of the embedded model, and what it is made of."""
