"""Source files that exported checkpoints carry, so that transformers can load them without this package.

They import torch and transformers alone.
"""
