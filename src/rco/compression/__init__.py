"""One file, one kind of compression: a model becomes a problem and an objective, an allocation a model."""
