"""Loading of models: built-in names, local folders, GGUF files, folders of runs, Hub ids."""

from __future__ import annotations

import hashlib
import importlib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from rco.models.checkpoint_files import file_sha256, folder_fingerprint, read_config, weight_files
from rco.models.device_map import DeviceMap
from rco.models.gguf_file import GGUFReader
from rco.models.layout import Layout, layout_for
from rco.models.zoo import ModelError, builtin_models, find_builtin, near_matches
from rco.requirements import find_problem, require

__all__ = [
    "LoadedModel",
    "checkpoint_of",
    "load",
    "load_model",
    "locate_model",
    "outline_model",
    "pick_device",
    "refuse_quantized",
    "without_progress_bars",
    "wrap_model",
]

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
_DENSE_PACKING = "0.18"  # first compressed-tensors in which codes may span two words
_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]


@dataclass(eq=False)
class LoadedModel:
    """A causal language model ready for work: evaluation mode, no gradients, its layout.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer; None only for a model that was wrapped without one.
        layout: Its blocks, linears and output layer.
        name: Name given by the user.
        path: Its folder; None for a model that was made in memory.
        gguf: Its GGUF file, if it was read from one.
        place: Device for which a model without weights is planned.
    """

    model: nn.Module
    tokenizer: Any
    layout: Layout
    name: str
    path: Path | None
    _hash: Callable[[], str] = field(repr=False)
    gguf: Path | None = field(default=None, kw_only=True)
    place: torch.device | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        """One line; ``.model`` prints all modules."""
        kind = type(self.model).__name__
        return f"LoadedModel({self.name!r}: {kind}, {self.dtype}, {self.device}; .model, .tokenizer)"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the config and the weights, by which a store recognises another model."""
        return self._hash()

    @property
    def device(self) -> torch.device:
        """Device of the token embedding."""
        return self.place or self.layout.embedding(self.model).weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the token embedding, and so of the hidden states."""
        return self.layout.embedding(self.model).weight.dtype


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    attention: str | None = None,
    device_map: DeviceMap | None = None,
    revision: str | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Args:
        name: A built-in name, a local folder, a ``.gguf`` file, or a Hub id.
        dtype: ``"auto"`` keeps the type of the checkpoint (float32 if that is neither bfloat16 nor float32, so
            that nothing is rounded); or a type.
        device: ``"cpu"``, ``"cuda"``, ``"mps"``; ``"auto"`` picks the fastest available.
        trust_remote_code: Let the checkpoint run its own Python code.
        attention: Attention implementation of transformers; None for its default (sdpa, else eager).
        device_map: Divide the model among several GPUs instead of putting it on ``device``.
        revision: Branch, tag or commit of a Hub model; None for its default branch.

    Raises:
        ModelError: The model cannot be found, read or used; the message has the reason and a remedy.
    """
    target = pick_device(device)
    label = str(name)
    folder, gguf_file = locate_model(name, revision=revision)
    if gguf_file is not None:
        files = [folder / gguf_file]
        keywords: dict[str, Any] = {"gguf_file": gguf_file}
        kept = torch.float32  # the type that holds every dequantised value exactly
    else:
        config = read_config(folder)
        check_config(config, label, trust_remote_code)
        check_packing(config, label)
        files = weight_files(folder)
        keywords = {}
        kept = _checkpoint_dtype(config, label)
    if attention is not None:
        keywords["attn_implementation"] = attention
    if device_map is not None:
        keywords["device_map"] = device_map.strategy
        keywords["max_memory"] = device_map.free_memory()
    chosen = kept if dtype == "auto" else _as_dtype(dtype)
    if gguf_file is not None:
        # Reading the file's metadata is slow, so the config is read once and passed on.
        keywords["config"] = _gguf_config(folder, gguf_file, label)
    model = _from_pretrained(folder, label, dtype=chosen, trust_remote_code=trust_remote_code, **keywords)
    for name in ("attn_implementation", "device_map", "max_memory"):
        keywords.pop(name, None)
    tokenizer = _load_tokenizer(folder, label, trust_remote_code=trust_remote_code, **keywords)
    if device_map is None:
        model = model.to(target)
    else:
        device_map.check(model, label)
    model.eval().requires_grad_(False)

    def fingerprint() -> str:
        return file_sha256(files[0]) if gguf_file is not None else folder_fingerprint(folder, files)

    file = None if gguf_file is None else folder / gguf_file
    return LoadedModel(model, tokenizer, layout_for(model), label, folder, fingerprint, gguf=file)


def _gguf_config(folder: Path, gguf_file: str, label: str) -> Any:
    try:
        return _transformers().AutoConfig.from_pretrained(folder, gguf_file=gguf_file)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(
            f"transformers cannot read the GGUF file {label}: {_first_line(error)} Pass the folder of the original "
            "model instead."
        ) from error


def outline_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> LoadedModel:
    """A model without weights, on the meta device, for planning; arguments as for :func:`load_model`.

    Of a Hub model only the config is downloaded. A GGUF file is loaded in full.
    """
    folder, gguf_file = locate_model(name, weights=False, revision=revision)
    if gguf_file is not None:
        return load_model(name, dtype=dtype, device=device)
    label, config = str(name), read_config(folder)
    check_config(config, label, trust_remote_code)
    chosen = _checkpoint_dtype(config, label) if dtype == "auto" else _as_dtype(dtype)
    transformers = _transformers()
    own_code = {"trust_remote_code": trust_remote_code}
    described = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **own_code)
    cls = _model_class(folder, transformers, trust_remote_code)
    with torch.device("meta"):
        if cls is transformers.AutoModelForCausalLM:
            model = cls.from_config(described, dtype=chosen, **own_code)
        else:
            model = cls._from_config(described, dtype=chosen)
    model.eval().requires_grad_(False)

    def no_weights() -> str:
        raise ModelError(f"{label} was outlined without weights, so it has no fingerprint.")

    return LoadedModel(model, None, layout_for(model), label, folder, no_weights, place=pick_device(device))


def wrap_model(model: nn.Module, tokenizer: Any = None, *, name: str = "model") -> LoadedModel:
    """Make a :class:`LoadedModel` of a model that is already in memory; puts it in evaluation mode."""
    layout = layout_for(model)
    model.eval().requires_grad_(False)

    def fingerprint() -> str:
        digest = hashlib.sha256()
        for key, value in sorted(model.state_dict().items()):
            digest.update(f"{key}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
            digest.update(_raw_bytes(value))
        return digest.hexdigest()

    return LoadedModel(model, tokenizer, layout, name, None, fingerprint)


def _raw_bytes(value: Tensor) -> Any:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def pick_device(device: str | torch.device) -> torch.device:
    """The requested device; ``auto`` is cuda if torch can use it, else mps, else cpu.

    Raises:
        ModelError: This machine does not have the device.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if device == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ModelError(f"Unknown device {device!r}; use auto, cpu, cuda, cuda:N or mps.") from None
    present = {"cpu": True, "cuda": cuda, "mps": mps, "meta": True}
    if not present.get(wanted.type, False):
        here = ", ".join(kind for kind in ("cpu", "cuda", "mps") if present[kind])
        raise ModelError(f"This machine has no {wanted.type} device that torch can use; it has {here}.")
    if wanted.type == "cuda" and wanted.index is not None and wanted.index >= torch.cuda.device_count():
        raise ModelError(f"There is no {wanted}; this machine has {torch.cuda.device_count()} CUDA devices.")
    return wanted


# ---------------------------------------------------------------------- finding


def locate_model(
    name: str | Path, *, weights: bool = True, revision: str | None = None
) -> tuple[Path, str | None]:
    """Folder of a model, downloading it if it is a Hub id; and the name of its GGUF file, if it is one.

    Without ``weights`` only the config of a Hub model is downloaded.

    A built-in name wins over a folder of the same name; write ``./name`` to mean the folder.
    """
    text = str(name)
    builtin = find_builtin(text) if isinstance(name, str) else None
    if builtin is not None:
        return builtin.locate()
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.gguf")) if not (path / "config.json").is_file() else []
        if len(files) > 1:
            raise ModelError(
                f"{text} holds {len(files)} GGUF files and no config.json; pass one of them, such as {files[0]}."
            )
        if not files:
            return path.resolve(), None
        path = files[0]
    if path.is_file() and path.suffix.lower() == ".gguf":
        require("gguf", f"Reading {text}")
        GGUFReader(path)  # a damaged file fails here, with the reason
        return path.resolve().parent, path.name
    if path.is_file():
        raise ModelError(
            f"{text} is a file; pass a .gguf file, or the folder that holds config.json and the weights."
        )
    close = near_matches(text) if "/" not in text else []
    if close:
        raise ModelError(f"There is no model {text!r}. Did you mean {' or '.join(close)}?")
    if isinstance(name, Path) or text.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(text):
        known = ", ".join(model.name for model in builtin_models())
        raise ModelError(
            f"There is no folder or file {text}. Pass a model folder, a .gguf file, a Hub id, or a built-in name "
            f"({known})."
        )
    return _download(text, weights, revision), None


def _download(hub_id: str, weights: bool = True, revision: str | None = None) -> Path:
    """A Hub model's folder in the local cache; the config comes first, so that unsupported models fail early."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=["config.json"]))
        check_config(read_config(folder), hub_id, trust_remote_code=True)
        if not weights:
            return folder
        folder = Path(snapshot_download(
            hub_id, revision=revision, allow_patterns=[*_SMALL_FILES, "*.py", "*.safetensors"],
            ignore_patterns=["original/*", "consolidated*"],
        ))  # fmt: skip
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=["pytorch_model*"]))
    except GatedRepoError:
        raise ModelError(
            f"{hub_id} is gated: accept its terms on huggingface.co, then log in with `hf auth login` or set "
            "HF_TOKEN."
        ) from None
    except RevisionNotFoundError:
        raise ModelError(
            f"{hub_id} has no revision {revision!r}: pass a branch, a tag or a commit of it."
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"The Hub has no model {hub_id!r}, or it is private: check the spelling, or run `hf auth login` or "
            "set HF_TOKEN."
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError):
        known = ", ".join(model.name for model in builtin_models() if model.available)
        raise ModelError(
            f"{hub_id} is not on this machine and the Hub cannot be reached: download it where there is a network "
            f"and pass its folder, or use a built-in model ({known})."
        ) from None
    return folder


# ---------------------------------------------------------------------- checking


def check_config(config: dict[str, Any], label: str, trust_remote_code: bool = False) -> None:
    """Raise an error unless a config is that of a causal language model that transformers can build.

    Raises:
        ModelError: Encoder-decoder, no language-model head, needs its own code, or unknown to transformers.
    """
    architectures = [str(entry) for entry in config.get("architectures") or []]
    shown = f"{label} ({', '.join(architectures) or config['model_type']})"
    headless = bool(architectures) and not any(entry.endswith(_CAUSAL) for entry in architectures)
    if config.get("is_encoder_decoder") or headless:
        raise ModelError(
            f"{shown} is not a decoder-only language model; pass one whose config names an architecture that ends "
            "in ForCausalLM."
        )
    known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    if config["model_type"] in known:
        return
    if "auto_map" not in config:
        version = _transformers().__version__
        raise ModelError(
            f"transformers {version} does not know the architecture {config['model_type']!r} of {shown}; use a "
            "version that does."
        )
    if not trust_remote_code:
        raise ModelError(
            f"{shown} needs the Python code it ships; pass `trust_remote_code=True` if you trust it."
        )


def refuse_quantized(config: Any, label: str) -> None:
    """Raise an error for a model with packed weights; one read from a GGUF file is already decoded.

    Args:
        config: A model's config, as an object or as ``config.json`` has it.
        label: Name given by the user.

    Raises:
        ModelError: The config describes quantized weights.
    """
    name = "quantization_config"
    found = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    if not found:
        return
    found = found if isinstance(found, dict) else found.to_dict()
    method = str(found.get("quant_method") or "quantized")
    if method.lower().rpartition(".")[2] != "gguf":
        raise ModelError(f"{label} is quantized already ({method}): pass the full-precision model.")


def check_packing(config: dict[str, Any], label: str) -> None:
    """Raise an error for a packed checkpoint that the installed compressed-tensors would unpack wrongly.

    Since 0.18 codes are packed without gaps; before, a word of 32 bits held only whole codes. Both agree if the
    width divides 32.

    Raises:
        ModelError: compressed-tensors is missing, or too old for a width of the checkpoint.
    """
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") != "compressed-tensors":
        return
    groups = (quantization.get("config_groups") or {}).values()
    # Of several layouts in one checkpoint, every group names its own.
    packed = [g for g in groups if (g.get("format") or quantization.get("format")) == "pack-quantized"]
    widths_of = [(group.get("weights") or {}).get("num_bits") for group in packed]
    split = sorted({bits for bits in widths_of if bits and 32 % bits})
    problem = find_problem("compressed-tensors", _DENSE_PACKING if split else "")
    if problem is not None:
        widths = f" with weights of {' and '.join(map(str, split))} bits" if split else ""
        raise ModelError(
            f"{label} is packed{widths}, and reading it needs {problem} If another package (such as vLLM 0.32) "
            "requires an older one, use a separate environment."
        )


def _as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    chosen = _DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if chosen is None or not chosen.is_floating_point:
        raise ModelError(f"Unknown dtype {dtype!r}; use auto, {', '.join(_DTYPES)}.")
    return chosen


def _checkpoint_dtype(config: dict[str, Any], label: str) -> torch.dtype:
    text = config.get("text_config") or {}
    named = next(
        (source[key] for source in (config, text) for key in ("dtype", "torch_dtype") if source.get(key)),
        "float32",
    )
    if named in ("bfloat16", "float32"):
        return _DTYPES[named]
    logger.info("%s is stored as %s; loading it as float32, which holds it exactly.", label, named)
    return torch.float32


# ---------------------------------------------------------------------- reading


def _from_pretrained(folder: Path, label: str, **keywords: Any) -> nn.Module:
    transformers = _transformers()
    try:
        with without_progress_bars(transformers):
            model, report = _model_class(
                folder, transformers, keywords.get("trust_remote_code", False)
            ).from_pretrained(folder, output_loading_info=True, local_files_only=True, **keywords)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise ModelError(f"{label} could not be loaded: {_first_line(error)}") from error
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise ModelError(
            f"The checkpoint of {label} lacks {len(missing)} tensors of the model, first {missing[0]}; they "
            "would be random. Use a complete checkpoint."
        )
    return _unpacked(cast(Any, model))


def _unpacked(model: Any) -> nn.Module:
    """The model with packed weights decoded, in the type of the checkpoint.

    compressed-tensors would decode them in the first forward pass, in the type of the scales at that time. If the
    arithmetic is wider than the checkpoint, the values would differ from those of a serving engine.
    """
    if hasattr(model, "ct_decompress_hook"):
        model.hf_quantizer.compressor.decompress_model(model)
    return cast(nn.Module, model)


def _model_class(folder: Path, transformers: Any, own_code: bool = False) -> Any:
    """The class to load with: the stock one, or the one that builds experts as configured.

    With counts per layer, experts are cut to size; with a precision per expert, they are built separately. A
    checkpoint carries the same code, which is not run here.
    """
    config = read_config(folder) if (folder / "config.json").is_file() else {}
    text = config.get("text_config") or config
    listed, separate = text.get("num_experts_per_layer"), text.get("separate_experts")
    if not listed and not separate:
        if own_code and "auto_map" in config:
            return transformers.AutoModelForCausalLM
        # A checkpoint with more than a language part is loaded with the class that it names.
        named = next(
            (str(entry) for entry in config.get("architectures") or [] if entry.endswith(_CAUSAL)), ""
        )
        return getattr(transformers, named, transformers.AutoModelForCausalLM)
    from rco.models.moe.layers import named_class
    from rco.models.remote_code.modeling_pruned_experts import pruned_class
    from rco.models.remote_code.modeling_unfused_experts import unfused_class

    cls = named_class(str(config["model_type"]), config.get("architectures"))
    cls = pruned_class(cls) if listed else cls
    return unfused_class(cls) if separate else cls


def _load_tokenizer(folder: Path, label: str, **keywords: Any) -> Any:
    try:
        return _transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True, **keywords)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError) as error:
        raise ModelError(
            f"{label} has no tokenizer that can be read ({_first_line(error)}); put the tokenizer files of the "
            "original model into its folder."
        ) from error


@contextmanager
def without_progress_bars(transformers: Any) -> Iterator[None]:
    """Keep transformers from drawing progress bars."""
    # Progress is reported by the caller; transformers would draw its own bars on stderr.
    settings = transformers.utils.logging
    shown = settings.is_progress_bar_enabled()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            settings.enable_progress_bar()


def _transformers() -> Any:
    require("transformers", "Loading a model")
    return importlib.import_module("transformers")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def checkpoint_of(path: str | Path) -> str | Path:
    """The checkpoint inside a run's folder; any other path or name is returned unchanged.

    Raises:
        ModelError: The folder is a run that has written no checkpoint.
    """
    folder = Path(path).expanduser()
    if not (folder / "problem.json").is_file():
        return path
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    raise ModelError(
        f"{folder} is a run without a checkpoint: continue it with `resume=True`, or export it with `rco export`."
    )


def load(name: str | Path, **settings: Any) -> LoadedModel:
    """Load a model: a run's folder, a built-in name, a local folder or a Hub id; stock, quantized or pruned.

    Checkpoints whose layers keep different numbers of experts load without running the code that they carry.

    Args:
        name: The model.
        settings: As for :func:`load_model`: ``dtype``, ``device``, ``attention``,
            ``trust_remote_code``.

    Returns:
        An object with the transformers model as ``.model`` and its tokenizer as ``.tokenizer``.
    """
    return load_model(checkpoint_of(name), **settings)
