"""Contract of exporters, as a check for any implementation; a failed one raises AssertionError."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rco.export.exporter import Exporter
    from rco.formats.base import Stored
    from rco.models.loading import LoadedModel

__all__ = ["check_exporter"]


def check_exporter(exporter: Exporter, source: LoadedModel, weights: Mapping[str, Any], folder: Path) -> None:
    """Check that an exporter writes what it reports, completely or not at all, and leaves the model unchanged.

    Args:
        exporter: The exporter.
        source: A model that it can write.
        weights: Packed weights (:class:`rco.formats.base.Stored`) of some of its linears, or none.
        folder: An empty folder to work in.
    """
    from rco.export.exporter import ExportError, ExportRequest

    before = {name: value.clone() for name, value in source.model.state_dict().items()}
    out = folder / "out"
    request = ExportRequest(source, weights, out)
    summary = exporter.export(request)
    assert Path(summary.path) == out, f"the summary names {summary.path}, the folder is {out}"
    assert summary.files == _sizes(out), "the summary's files are not those that were written"
    shards = sorted(out.glob("*.safetensors"))
    if shards:
        written = sum(shard.stat().st_size for shard in shards)
        assert summary.total_bytes == written, f"{summary.total_bytes} bytes reported, {written} written"
        _check_logits(source, weights, out)
    content = {path.name: path.read_bytes() for path in out.iterdir()}
    _expect(ExportError, lambda: exporter.export(request), "a folder that is not empty")
    exporter.export(replace(request, overwrite=True))
    again = {path.name: path.read_bytes() for path in out.iterdir()}
    assert again == content, f"written twice, {_different(content, again)} differ"
    unknown: dict[str, Any] = {"no.such.linear": next(iter(weights.values()), None)}
    if weights:
        wrong = ExportRequest(source, unknown, folder / "unknown")
        _expect(ExportError, lambda: exporter.export(wrong), "an unknown linear")
    broken = replace(source, tokenizer=_BrokenTokenizer())
    try:
        exporter.export(ExportRequest(broken, weights, folder / "broken"))
    except (OSError, ExportError):
        assert not (folder / "broken").exists(), "an export that failed has left a folder"
    left = {path.name for path in folder.iterdir()} - {"out", "broken"}
    assert not left, f"{', '.join(sorted(left))} were left behind"
    for name, value in source.model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} of the model has changed"


class _BrokenTokenizer:
    """A tokenizer that cannot be saved, as on a full disk."""

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        raise OSError("cannot write the tokenizer")


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def _different(first: Mapping[str, bytes], second: Mapping[str, bytes]) -> str:
    names = sorted(first.keys() | second.keys())
    return ", ".join(name for name in names if first.get(name) != second.get(name))


def _expect(kind: type[Exception], work: Any, what: str) -> None:
    try:
        work()
    except kind:
        return
    raise AssertionError(f"{what} is not refused with {kind.__name__}")


@torch.no_grad()
def _check_logits(source: LoadedModel, weights: Mapping[str, Stored], folder: Path) -> None:
    """Check that a checkpoint loads as the model with its weights decoded."""
    from rco.compression.deployment import decode_into
    from rco.models.loading import load_model

    expected = replace(source, model=copy.deepcopy(source.model))
    decode_into(expected, weights)
    vocabulary = source.layout.embedding(source.model).weight.shape[0]
    tokens = torch.arange(16)[None] % vocabulary
    found = load_model(folder, device=str(source.device)).model(tokens.to(source.device)).logits.float()
    wanted = expected.model(tokens.to(source.device)).logits.float()
    difference, scale = float((found - wanted).abs().max()), float(wanted.abs().max())
    assert difference <= 1e-4 * scale, f"logits of the checkpoint differ by {difference:.3g} of {scale:.3g}"
