"""ggml's block types, the storage types of GGUF files."""
