"""The result of a compression: the model, its allocation and measurements, and ways to keep them."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from rco.atomic_files import write_json_atomic
from rco.compression.deployment import decode_into
from rco.compression.engines import find_engine
from rco.core.problem import Allocation
from rco.core.result import SearchResult
from rco.formats.base import Stored
from rco.models.loading import LoadedModel
from rco.pipeline.checkpoints import export_checkpoint, make_exporter
from rco.pipeline.compress import Outcome
from rco.pipeline.configs import CompressConfig, PruneConfig, QuantizeConfig
from rco.pipeline.planning import Planned, slug
from rco.report import build_report
from rco.report.data import RunData, groups, moe_layers
from rco.report.heatmap import coloured, experts_html, experts_text, widths_html, widths_text
from rco.runs import RunDirectory

__all__ = ["CompressedModel", "ModelAllocation"]

_DOCUMENTS = ("config.json", "environment.json", "problem.json", "allocation.json", "history.jsonl")


class ModelAllocation(Mapping[str, int]):
    """Allocation of a model by name: bits of a linear, or 1 (kept) or 0 (pruned) of an expert.

    Prints as a heat map: kinds of linears by blocks, or experts by layers.

    Attributes:
        choices: The option chosen for each group, as the solver returned it.
        formats: Name of the format of each linear; empty for pruned experts.
    """

    def __init__(self, choices: Allocation, names: Sequence[str], metrics: Mapping[str, Any]) -> None:
        self.choices = choices
        self._run = RunData("", metrics)
        self.formats: dict[str, str] = {
            member: group["format"] for group in metrics.get("groups", ()) for member in group["members"]
        }
        if self._run.pruning:
            self._values = dict(zip(names, choices, strict=True))
        else:
            self._values = {
                member: int(group.width) for group in groups(self._run) for member in group.members
            }

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __str__(self) -> str:
        if self._run.pruning:
            return experts_text(moe_layers(self._run), colour=coloured())
        return widths_text(groups(self._run), colour=coloured())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return experts_html(moe_layers(self._run)) if self._run.pruning else widths_html(groups(self._run))


class CompressedModel:
    """A compressed model, returned by :func:`rco.quantize` and :func:`rco.prune`.

    Attributes:
        tokenizer: The model's tokenizer.
        allocation: Option of each linear or expert; prints as a heat map.
        metrics: All measurements, ready for JSON: ``budget``, ``evaluation`` (KL and perplexity beside
            the full model and simple allocations), ``timings``, and after :meth:`save` ``export`` and
            ``certificate``.
        search: Result of the search: loss, cost, candidates.
        folder: The run's folder; None if nothing is written.
        checkpoint: The checkpoint in the run's folder, if one was written.
    """

    def __init__(
        self,
        outcome: Outcome,
        config: CompressConfig,
        *,
        owner: nn.Module | None = None,
        inplace: bool = False,
    ) -> None:
        self.metrics: dict[str, Any] = dict(outcome.metrics)
        self.search: SearchResult = outcome.result
        names = [group.name for group in outcome.planned.compression.plan.groups]
        self.allocation = ModelAllocation(outcome.result.allocation, names, self.metrics)
        self.folder: Path | None = config.out
        self.checkpoint: Path | None = outcome.checkpoint
        self._config = config
        self._planned: Planned = outcome.planned
        self._documents = {
            name: (outcome.folder / name).read_text(encoding="utf-8")
            for name in _DOCUMENTS
            if (outcome.folder / name).exists()
        }
        self.tokenizer: Any = outcome.planned.loaded.tokenizer
        self._weights: dict[str, Stored] = {}
        self._source: LoadedModel | None = None  # made on first use
        self._decoded = False
        if config.out is None:  # the candidates are about to be removed
            self._pruned()
        if owner is not None:
            source = self._pruned()
            if not inplace:  # later changes to this model do not affect the given one
                source = dataclasses.replace(source, model=copy.deepcopy(source.model))
            self._source = source
            self._deployed()
            if inplace and source.model is not owner:
                _become(owner, source.model)
                self._source = dataclasses.replace(source, model=owner)

    @property
    def model(self) -> Any:
        """The compressed model, with the weights of its saved checkpoint; it generates text."""
        return self._deployed().model

    def _deployed(self) -> LoadedModel:
        """The compressed model: without pruned experts, with decoded weights."""
        source = self._pruned()
        if not self._decoded:
            decode_into(source, self._weights)
            self._decoded = True
        return source

    def _pruned(self) -> LoadedModel:
        """The model without its pruned experts; its weights may not be decoded yet."""
        if self._source is None:
            compression = self._planned.compression
            self._source, weights = compression.deployed(self.search.allocation)
            self._weights = {name: packed.clone() for name, packed in weights.items()}
            compression.forget_candidates()
        return self._source

    def save(self, path: str | Path, format: str | None = None, *, overwrite: bool = False) -> Path:
        """Write a checkpoint that engines load, with the tokenizer; its size is counted again from its files.

        Args:
            path: The folder, written atomically.
            format: One of `rco ls formats`; default: the `format` of the compression, or that of `serve`.
            overwrite: Replace a folder that is not empty.

        Returns:
            The folder.

        Raises:
            ValueError: The format is unknown or cannot hold this model, or the folder cannot be written.
        """
        out, form = Path(path).expanduser(), format or self._default_format()
        make_exporter(form, self._planned.compression.kind)
        removes_only = self._planned.compression.plan.removes_only
        source = self._deployed() if removes_only else self._pruned()
        written = export_checkpoint(
            self._planned,
            self.search.allocation,
            form,
            out,
            overwrite=overwrite,
            deployed=(source, self._weights),
        )
        self.metrics.update(written)
        return out

    def _default_format(self) -> str:
        config = self._config
        if isinstance(config, PruneConfig):
            return "pruned-padded" if config.padded else "pruned"
        assert isinstance(config, QuantizeConfig)
        return config.format if config.format not in (None, "none") else find_engine(config.engine).format

    def report(self, path: str | Path) -> Path:
        """Write an HTML page about the result: allocation, costs and search.

        Returns:
            The file.
        """
        with tempfile.TemporaryDirectory(prefix="rco-") as parent:
            folder = Path(parent) / slug(f"{self._config.model}-{self._config.requested}")
            folder.mkdir()
            for name, text in self._documents.items():
                (folder / name).write_text(text, encoding="utf-8")
            write_json_atomic(folder / "metrics.json", self.metrics)
            return build_report([RunDirectory.open(folder)], Path(path).expanduser())

    def push_to_hub(
        self,
        repo_id: str,
        *,
        format: str | None = None,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> Any:
        """Upload the checkpoint to the Hugging Face Hub, as ``push_to_hub`` of transformers does.

        Args:
            repo_id: ``user/name``; created if missing.
            format: As for :meth:`save`.
            commit_message: Message of the commit.
            private: Whether a new repository is private; None: the account's default.
            token: A token; None: the one of `hf auth login`.
            revision: Branch to commit to; created if missing.
            create_pr: Open a pull request instead of committing.

        Returns:
            The commit, as huggingface_hub describes it.
        """
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory(prefix="rco-") as parent:
            folder = self.save(Path(parent) / "model", format)
            repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if revision is not None and not create_pr:
                api.create_branch(repository, branch=revision, exist_ok=True)
            return api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=commit_message or f"Upload {self._config.model} compressed by rco",
                revision=revision,
                create_pr=create_pr,
            )

    def __repr__(self) -> str:
        budget = self.metrics["budget"]
        lines = [
            f"{Path(self._config.model).name} at {budget['requested']} {budget['kind']}: {budget['used']} used"
        ]
        for row in self.metrics["evaluation"]:
            amount = f"{row['bits']:.3g} bits" if "bits" in row else f"{row['experts']} experts"
            mark = "*" if row["chosen"] else " "
            lines.append(
                f"{mark} {row['name']:<24} {amount:>12}  KL {row['kl']:.4f}  perplexity {row['perplexity']:.2f}"
            )
        return "\n".join(lines)


def _become(model: nn.Module, other: nn.Module) -> None:
    """Turn a module into another one, for all references to it: class and attributes are replaced."""
    model.__class__ = other.__class__
    object.__setattr__(model, "__dict__", other.__dict__)
