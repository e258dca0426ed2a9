"""Figures as files: reproducible, small, and the same drawing."""

import re
from xml.etree import ElementTree

import numpy as np

from rco import plotting


def figure():
    drawn = plotting.figure_class()(figsize=(4, 3))
    axis = drawn.add_subplot()
    axis.plot(
        np.linspace(0, 1, 50), np.linspace(0, 1, 50) ** 2 / 3, marker="o", label="0.123456789 of 1.000001"
    )
    axis.scatter([0.1, 0.7], [1e-7, 0.2])
    axis.legend()
    plotting.polish(axis, "a title with 3.14159265 in it")
    return drawn


def numbers_and_rest(drawing):
    """Coordinates of an SVG file, and everything else in it."""
    numbers, rest = [], []
    for element in ElementTree.fromstring(drawing).iter():
        rest += [element.tag, (element.text or "").strip()]
        for name, value in sorted(element.attrib.items()):
            if name in ("d", "x", "y", "transform"):
                numbers += map(float, re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", value))
                value = re.sub(r"[\d.\s-]+", " ", re.sub(r"(?<=\d)e-\d+", "", value))
                value = re.sub(r"\s*([A-Za-z()])\s*", r"\1", value)
            rest.append((name, value))
    return np.array(numbers), rest


def test_a_shorter_drawing_is_the_same_drawing(tmp_path):
    plain = tmp_path / "plain.svg"
    figure().savefig(plain, format="svg", metadata={"Date": None})
    long = plain.read_text(encoding="utf-8")
    short = plotting.shortened(long)
    (before, kept), (after, same) = numbers_and_rest(long), numbers_and_rest(short)
    assert len(before) > 300
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-9)
    assert kept == same
    assert len(short) < 0.9 * len(long)
    assert plotting.shortened(short) == short


def test_files_are_reproducible_and_texts_stay(tmp_path):
    first, second = (
        plotting.save_figures(tmp_path / name, {"one": figure()}, formats=("svg",))[0].read_bytes()
        for name in ("a", "b")
    )
    assert first == second
    assert b"0.123456789 of 1.000001" in first
    assert b"a title with 3.14159265 in it" in first
