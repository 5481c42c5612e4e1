"""The matrix products of a model, from its config.json."""
