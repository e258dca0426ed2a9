"""Files of a checkpoint folder: their list, completeness checks, and a hash of their content."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from rco.models.zoo import ModelError

__all__ = ["check_safetensors", "file_sha256", "folder_fingerprint", "read_config", "weight_files"]

_INDEX = "model.safetensors.index.json"
_BIN_INDEX = "pytorch_model.bin.index.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 22
# Fields of a config that change without the model changing.
_VOLATILE = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "_attn_implementation",
}


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a folder.

    Raises:
        ModelError: There is none, or it is not one JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} holds no config.json, so it is not a Hugging Face model folder; pass the folder that "
            "save_pretrained wrote or that was downloaded from the Hub."
        )
    config = _read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} names no model_type; it is not the config of a Hugging Face model.")
    return config


def weight_files(folder: Path) -> list[Path]:
    """Files that hold the weights, in a fixed order; all of them exist and are complete.

    Raises:
        ModelError: No weights, a missing shard, or a truncated safetensors file; the message names the file.
    """
    single, index = folder / "model.safetensors", folder / _INDEX
    if single.is_file():
        files = [single]
    elif index.is_file():
        files = _shards(index)
    elif (folder / "pytorch_model.bin").is_file():
        return [folder / "pytorch_model.bin"]
    elif (folder / _BIN_INDEX).is_file():
        return _shards(folder / _BIN_INDEX)
    else:
        raise ModelError(
            f"{folder} holds no weights, neither model.safetensors nor {_INDEX}; download them again."
        )
    for file in files:
        check_safetensors(file)
    return files


def _shards(index: Path) -> list[Path]:
    mapping = _read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ModelError(f"{index} has no weight_map; download the index again.")
    names = sorted(set(mapping.values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelError(
            f"{index.parent} lacks {len(missing)} of its {len(names)} shards: {', '.join(missing[:4])}"
            f"{', ...' if len(missing) > 4 else ''}; download the missing files again."
        )
    return [index.parent / name for name in names]


def check_safetensors(path: Path) -> None:
    """Compare the length of a safetensors file with its header.

    Raises:
        ModelError: The file is truncated, too long, or not a safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise ModelError(f"{path} is truncated: {size} bytes end within its header; download it again.")
        try:
            header = json.loads(file.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError):
            raise ModelError(
                f"{path} is not a safetensors file: its header is not JSON; download it again."
            ) from None
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        kind = "truncated" if size < expected else "damaged"
        raise ModelError(
            f"{path} is {kind}: it has {size} bytes, its header says {expected}; download it again."
        )


def folder_fingerprint(folder: Path, files: list[Path]) -> str:
    """A hash of the config and of every byte of the weights; independent of the folder's path."""
    digest = hashlib.sha256()
    if (folder / "config.json").is_file():
        config = {key: value for key, value in read_config(folder).items() if key not in _VOLATILE}
        digest.update(json.dumps(config, sort_keys=True).encode())
    with ThreadPoolExecutor(max_workers=4) as pool:
        for file, content in zip(files, pool.map(file_sha256, files), strict=True):
            digest.update(f"\0{file.name}\0{content}".encode())
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, cached while its size and modification time stay the same."""
    # In the Hub's cache a weight file is a link to a blob whose name is this hash.
    target = path.resolve()
    if path.is_symlink() and _SHA256.fullmatch(target.name):
        return target.name
    status = target.stat()
    return _sha256(target, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _sha256(path: Path, size: int, modified: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download it again.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold one JSON object, got {type(content).__name__}.")
    return content
