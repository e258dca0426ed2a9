"""Arguments in messages as flags: every message of the library, on the command line."""

import re

import pytest

from rco.cli.flags import as_flags


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("`steps` must be at least 0, got -1.", "--steps must be at least 0, got -1."),
        ("use `serve='vllm'`", "use --serve vllm"),
        ('use `serve="vllm-marlin"`', "use --serve vllm-marlin"),
        ("leave out `symmetric=False`", "leave out --no-symmetric"),
        ("continue with `resume=True`", "continue with --resume"),
        ("`group_size=64` or `experts=0.25`", "--group-size 64 or --experts 0.25"),
        ("`lock='attention=16'`", "--lock attention=16"),
        (r"`skip='\d\.(a|b)$'`", r"--skip '\d\.(a|b)$'"),
        ("see `rco ls formats`, `hf auth login`", "see `rco ls formats`, `hf auth login`"),
        ("`no_such_argument` stays", "`no_such_argument` stays"),
        ("`model` is needed", "MODEL is needed"),
    ],
)
def test_arguments_become_flags(text, shown):
    assert as_flags(text) == shown


def test_errors_and_help_name_flags(run, random_llama, tmp_path):
    code, _, err = run("quantize", random_llama, "--bits", "9", "--out", tmp_path / "run")
    assert code == 1
    assert "--bits must lie between 2 and 8" in err
    code, _, err = run("quantize", random_llama, "--bits", "3", "--steps", "-1", "--out", tmp_path / "run")
    assert code == 1
    assert err.endswith("Error: --steps must be at least 0, got -1.\n")
    code, out, _ = run("quantize", "--help")
    assert code == 0
    assert "`data`" not in out
    assert "--data" in out


def test_help_leaves_out_what_is_refused(run, random_llama):
    for command, given, refused in (
        (["frontier"], "--sizes", ("--bits", "--bpw", "--size", "--active-bits", "--tune", "--tune-tokens")),
        (["compare", "quantize"], "--methods", ("--prior", "--tune", "--tune-tokens")),
    ):
        code, out, _ = run(*command, "--help")
        assert code == 0
        shown = re.findall(r"^│ +(--[\w-]+)", out, re.MULTILINE)
        assert given in shown
        assert not set(refused) & set(shown)
    # They are known all the same: the message says what to give instead.
    code, _, err = run("frontier", random_llama, "--bits=3")
    assert code == 1
    assert "Give the sizes of a frontier as --sizes" in err
