"""Every recipe's dry run, on a tiny random model of its architecture, through the commands' own planning."""

import dataclasses
import importlib.util
import shlex
import sys
from pathlib import Path

import ablations
import pytest
import typer

from rco.cli.app import app
from rco.pipeline.configs import PruneConfig, QuantizeConfig

FOLDER = Path(__file__).parents[2] / "recipes"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "recipe")


@pytest.fixture(scope="module", autouse=True)
def recipes_importable():
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    sys.modules.pop("recipe", None)


def load(name):
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def planned(monkeypatch):
    """Counts what really goes through the pipeline's planning."""
    import rco.pipeline.planning

    seen = []
    for module, name in (
        (rco.pipeline.planning, "plan_compression"),
        (ablations, "plan_ablations"),
    ):
        original = getattr(module, name)

        def counted(config, *rest, original=original, **keywords):
            outcome = original(config, *rest, **keywords)
            seen.append((config, outcome))
            return outcome

        monkeypatch.setattr(module, name, counted)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_dry_run(name, planned, tmp_path, capsys):
    module = load(name)
    recipe = module.RECIPE
    assert module.run(recipe, ["--dry-run", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    for job in recipe.jobs:
        assert f"== {job.row}" in out
    searches = [job for job in recipe.jobs if not job.command.startswith("evaluate")]
    assert len(planned) == len(searches) > 0
    for _, outcome in planned:
        if hasattr(outcome, "loaded"):
            assert outcome.loaded.model.config.model_type == recipe.architecture
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", NAMES)
def test_evaluations_measure_what_the_recipe_makes(name):
    """Every run that is evaluated has a command that makes it, and every one that is made is evaluated."""
    made, evaluated = set(), set()
    for job in load(name).RECIPE.jobs:
        words = shlex.split(job.command)
        if words[0] == "evaluate":
            evaluated |= {word for word in words if word.startswith("{out}/")}
        elif words[0] != "benchmarks/ablations.py":
            made.add(words[words.index("--out") + 1])
    assert made == evaluated


def configurations(recipe):
    """The configuration behind every command that searches, read as the command line reads it."""
    verbs = typer.main.get_command(app).commands
    kinds = {
        "quantize": (QuantizeConfig, verbs["quantize"]),
        "prune": (PruneConfig, verbs["prune"]),
        "benchmarks/ablations.py": (ablations.AblationConfig, typer.main.get_command(ablations.app)),
    }
    for job in recipe.jobs:
        verb, *words = shlex.split(job.command)
        if verb in kinds:
            kind, command = kinds[verb]
            given = command.make_context(verb, words).params
            known = {field.name for field in dataclasses.fields(kind)}
            yield kind(**{key: value for key, value in given.items() if key in known})


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_the_papers_algorithm_with_its_settings(name):
    """Settings of the paper, or where it is silent those of its published code."""
    recipe = load(name).RECIPE
    for config in configurations(recipe):
        if isinstance(config, ablations.AblationConfig):
            assert (config.tau, config.printed_prior, config.group_size) == (0.01, "weight-error", 128)
            continue
        searcher = config.searcher
        assert searcher != "rco"
        if isinstance(config, QuantizeConfig):
            assert (config.group_size, config.symmetric, config.clip, config.sweeps) == (
                128,
                False,
                "minmax",
                0,
            )
            assert (config.sequences, config.length, config.batch_size) == (256, 2048, 1)
            assert searcher != "evopress" or config.generations == 100
            if searcher == "rco-plain":
                assert (config.tau, config.lr, config.antithetic) == ((1.0, 0.01), 0.1, False)
                assert (config.start, config.strength) == ("weight-error", 1.0)
        else:
            assert (config.sequences, config.length, config.batch_size, config.top_k) == (64, 2048, 4, 20)
            assert config.start == "reap"
            generations = 10 if recipe.model == "Qwen/Qwen3-30B-A3B" else 50
            assert searcher != "evoesap" or config.generations == generations
            if searcher == "rco-plain":
                assert (config.tau, config.samples, config.antithetic) == ((1.0, 0.05), 4, True)
                assert (config.gates, config.lr) == ("scale", 0.1)


def test_a_row_that_is_not_there_is_said(capsys):
    module = load(NAMES[0])
    with pytest.raises(SystemExit):
        module.run(module.RECIPE, ["--only", "no such row"])
    assert "no row contains" in capsys.readouterr().err
