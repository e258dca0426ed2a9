"""``--device``: one definition for all verbs, and what ``auto`` comes to is what runs, is said and is recorded."""

import json
from pathlib import Path

import ablations
import pytest
import torch
import typer

from rco.cli.app import app
from rco.distributed import Ranks
from rco.pipeline.configs import (
    ComparePruneConfig,
    CompareQuantizeConfig,
    EvaluateConfig,
    ExportConfig,
    PruneConfig,
    QuantizeConfig,
)

CONFIGS = [
    lambda **more: QuantizeConfig(model="m", bits="3", **more),
    lambda **more: PruneConfig(model="m", experts="0.25", **more),
    lambda **more: CompareQuantizeConfig(model="m", bits="3", **more),
    lambda **more: ComparePruneConfig(model="m", experts="0.25", **more),
    lambda **more: EvaluateConfig(paths=["m"], **more),
    lambda **more: ExportConfig(run=Path("r"), **more),
    lambda **more: ablations.AblationConfig(**more),
]


@pytest.fixture
def machine(monkeypatch):
    """Pretends that the machine has these devices."""

    def has(*kinds):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in kinds)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in kinds)

    return has


def commands(command, path=()):
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))
    else:
        yield " ".join(path), command


def test_every_verb_has_the_same_device_flag():
    flags = {
        name: next((p for p in command.params if p.name == "device"), None)
        for name, command in [
            *commands(typer.main.get_command(app)),
            ("benchmarks/ablations.py", typer.main.get_command(ablations.app)),
        ]
    }
    having = {name for name, flag in flags.items() if flag is not None}
    assert having >= {
        "quantize", "prune", "evaluate", "export", "compare quantize", "compare prune",
        "bench step", "bench memory", "benchmarks/ablations.py",
    }  # fmt: skip
    assert {(flags[name].default, flags[name].help) for name in having} == {
        ("auto", "auto (cuda if there is one, else mps, else cpu), cpu, cuda, cuda:N or mps.")
    }


@pytest.mark.parametrize("make", CONFIGS)
def test_a_config_names_a_device_and_never_auto(make, machine):
    for kinds, taken in ((("cuda", "mps"), "cuda"), (("mps",), "mps"), ((), "cpu")):
        machine(*kinds)
        config = make()
        assert config.device == taken
        if hasattr(config, "identity"):  # what a resumed run is compared by
            assert config.identity()["device"] == taken
            assert config.identity() == make(device=taken).identity()
    machine("cuda")
    assert make(device="cpu").device == "cpu"
    assert make(device="cuda:1").device == "cuda:1"


def test_each_rank_takes_a_gpu_of_its_own(machine, monkeypatch):
    machine("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    device = QuantizeConfig(model="m", bits="3").device
    assert [Ranks(rank, 2, rank, 2).device(device) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert taken == [0, 1]
    assert Ranks().device(device) == "cuda"


def test_what_was_taken_is_said(run, machine, random_llama, texts):
    machine()
    job = [
        "quantize",
        random_llama,
        "--bits",
        "3",
        "--data",
        texts,
        "--length",
        "16",
        "--group-size",
        "8",
        "--dry-run",
    ]
    code, _, err = run(*job)
    assert code == 0, err
    assert "device: cpu (--device auto)" in err
    assert "device:" not in run(*job, "--device", "cpu")[2]
    assert "device:" not in run(*job, "--quiet")[2]
    code, out, err = run(*job, "--json")
    assert code == 0, err
    assert "device:" not in err
    assert json.loads(out)["device"] == "cpu"
