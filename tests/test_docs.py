"""Every ``rco`` command that documents and help texts show is one that the command line takes."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import typer

from rco.cli.app import app
from rco.core.search import RCO
from rco.pipeline.configs import PruneConfig, QuantizeConfig
from rco.pipeline.searchers import search_settings

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def verbs(command, name="rco"):
    """(name, command) of every verb."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for part, inner in command.commands.items():
        yield from verbs(inner, f"{name} {part}")


VERBS = dict(verbs(typer.main.get_command(app)))


def parse(line):
    """Let the verb read its arguments, without running it; what the shell would take away is cut off."""
    words = shlex.split(re.split(r"\s{2,}|\s[#<>]", line)[0])
    name = next(" ".join(words[:n]) for n in (3, 2) if " ".join(words[:n]) in VERBS)
    arguments = words[name.count(" ") + 1 :]
    VERBS[name].make_context(name, arguments)


def commands_in(text):
    """Lines of code blocks, and what stands between backticks with arguments."""
    for block in re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL):
        lines = re.sub(r"\\\n\s*", " ", block).splitlines()
        found = (re.match(r"\s*(?:.*torchrun .* -m )?(rco .*)", line) for line in lines)
        yield from (match.group(1).strip() for match in found if match)
    for code in re.findall(r"`(rco [^`\n]+)`", text):
        if code not in VERBS and "|" not in code:
            yield code


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_documents_show_commands_that_parse(path):
    for line in commands_in(path.read_text(encoding="utf-8")):
        parse(line)


@pytest.mark.parametrize("name", sorted(VERBS))
def test_every_help_ends_with_two_commands_that_parse(name):
    shown = [line.strip() for line in (VERBS[name].help or "").splitlines()]
    examples = [line for line in shown if line.startswith("rco ")]
    assert len(examples) == 2
    assert [line for line in shown if line][-2:] == examples
    for line in examples:
        assert line.startswith(f"{name} ")
        parse(line)


def test_scripts_that_documents_name_exist():
    for path in DOCUMENTS:
        for script in re.findall(
            r"\b(?:benchmarks|recipes|examples)/\w+\.py\b", path.read_text(encoding="utf-8")
        ):
            assert (ROOT / script).is_file(), f"{path.name}: {script}"


def test_a_wrong_flag_would_be_noticed():
    with pytest.raises(Exception, match=r"(?i)no such option"):
        parse("rco quantize tiny-llama --bitss 2.5")


def test_links_between_documents_lead_somewhere():
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_paper_map_states_the_defaults_that_are_in_force():
    text = (ROOT / "docs" / "paper_map.md").read_text(encoding="utf-8")
    table = text.split("## Defaults")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line
    ]
    found = {row[0]: row[1:5] for row in rows[2:]}

    def stated(settings):
        values = {**settings, "last temperature": settings["tau"][1]}
        return ["no" if values[name] is False else str(values[name]) for name in found]

    commands = [QuantizeConfig(model="m"), PruneConfig(model="m")]
    expected = [stated(dataclasses.asdict(RCO())), *(stated(search_settings(config)) for config in commands)]
    for config in commands:
        plain = stated(search_settings(dataclasses.replace(config, searcher="rco-plain")))
        usual = stated(search_settings(config))
        pairs = zip(plain, usual, [row[3] for row in found.values()], strict=True)
        assert all(mine == (theirs if said == "as the command" else said) for mine, theirs, said in pairs)
    assert set(found) == {"steps", "samples", "lr", "last temperature", "antithetic", "refine"}
    assert [list(column) for column in zip(*found.values(), strict=True)][:3] == expected
