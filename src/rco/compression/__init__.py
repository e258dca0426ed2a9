"""A model as a problem and an objective, and an allocation as a compressed model."""
