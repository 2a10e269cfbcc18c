"""Every figure: the same bytes each time, in both palettes, described, readable, and true."""

import importlib
import re

import pytest
import torch
from site_project import ROOT

from guide_code.balance import expert_counts
from guide_code.figures import moe_dataflow, style
from guide_code.routers import top_k_routing
from guide_code.sitebuild.figures import figure_sources

NAMES = sorted(figure_sources(ROOT / "guide_code"))
PALETTES = (style.LIGHT, style.DARK)
each_figure = pytest.mark.parametrize("name", NAMES)


def module(name):
    return importlib.import_module(f"guide_code.figures.{name}")


def drawn(name, palette, layout, path):
    with style.consistent():
        size = style.save(module(name).draw(palette, layout), path)
    return path.read_text(encoding="utf-8"), size


def ratio(one, other):
    def luminance(color):
        parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return sum(
            weight * (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
            for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_there_are_figures():
    assert {"dense_vs_moe", "moe_dataflow"} <= set(NAMES)


@each_figure
def test_a_second_drawing_has_the_same_bytes(name, tmp_path):
    for layout in module(name).LAYOUTS:
        first, _ = drawn(name, style.LIGHT, layout, tmp_path / "first.svg")
        second, _ = drawn(name, style.LIGHT, layout, tmp_path / "second.svg")
        assert first == second
        assert not re.search(r"<dc:date|Matplotlib v", first), "neither date nor version"


@each_figure
def test_the_palettes_differ_and_nothing_hides_in_the_paper(name, tmp_path):
    light, dark = (drawn(name, palette, "wide", tmp_path / "x.svg")[0] for palette in PALETTES)
    assert light != dark
    assert style.LIGHT.ink in light and style.LIGHT.ink not in dark
    assert style.DARK.ink in dark


@each_figure
def test_it_is_described_in_sentences(name):
    alt = module(name).ALT
    assert len(alt) > 80 and alt.endswith(".") and not alt.lower().startswith(("image", "figure", "picture"))


@each_figure
def test_it_fits_a_phone_and_needs_no_fonts(name, tmp_path):
    assert module(name).LAYOUTS[0] == "wide"
    text, (width, _) = drawn(name, style.DARK, module(name).LAYOUTS[-1], tmp_path / "x.svg")
    assert width <= style.NARROW_WIDTH
    assert "<text" not in text and "http://" not in re.sub(r'xmlns(:\w+)?="[^"]*"|<!DOCTYPE[^>]*>', "", text).replace(
        "http://creativecommons.org/ns#", ""
    ).replace("http://purl.org/dc/dcmitype/StillImage", "")


@pytest.mark.parametrize("palette", PALETTES, ids=lambda palette: palette.name)
def test_words_stand_out_from_what_they_stand_on(palette):
    fills = [palette.paper, palette.surface, palette.tint(palette.accent)]
    fills += [palette.tint(color, strength) for color in palette.experts for strength in (0.18, 0.25)]
    assert min(ratio(palette.ink, fill) for fill in fills) >= 4.5
    assert min(ratio(palette.muted, fill) for fill in (palette.paper, palette.surface)) >= 4.5
    assert min(ratio(color, palette.paper) for color in (*palette.experts, palette.accent, palette.line)) >= 3


def test_the_drawn_routing_is_what_the_code_computes():
    scores = torch.full((4, moe_dataflow.NUM_EXPERTS), 1e-4)
    scores.scatter_(1, torch.tensor(moe_dataflow.CHOICES), torch.tensor(moe_dataflow.WEIGHTS))
    routing = top_k_routing(scores.log(), top_k=2)
    assert routing.ids.tolist() == [list(ids) for ids in moe_dataflow.CHOICES]
    assert torch.allclose(routing.weights, torch.tensor(moe_dataflow.WEIGHTS), atol=1e-3)
    assert moe_dataflow.counts() == expert_counts(routing.ids, moe_dataflow.NUM_EXPERTS).tolist()
    order = routing.ids.flatten().sort(stable=True).indices.tolist()
    assert [token * 2 + choice for _, token, choice in moe_dataflow.sorted_rows()] == order
