"""Compression of single tensors: tensors in, tensors out, no knowledge of any model."""
