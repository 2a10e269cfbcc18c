"""Every figure: the same bytes each time, in both palettes, described, readable at a desk and on a phone."""

import functools
import importlib
import inspect
import json
import re
from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Circle, FancyBboxPatch
from matplotlib.text import Text
from site_project import ROOT

from guide_code.figures import style
from guide_code.sitebuild.figures import figure_sources

NAMES = sorted(figure_sources(ROOT / "guide_code"))
PALETTES = (style.LIGHT, style.DARK)
GALLERY = (ROOT / "docs/reference/figures.md").read_text(encoding="utf-8")
each_figure = pytest.mark.parametrize("name", NAMES)


def module(name):
    return importlib.import_module(f"guide_code.figures.{name}")


def draw(name, palette, layout):
    data = [json.loads((ROOT / "docs/data" / file).read_text()) for file in getattr(module(name), "DATA", ())]
    return module(name).draw(palette, layout, *data)


@functools.cache
def drawn(name, palette, layout, folder):
    """The drawing, its file's text and its size; a drawing is slow, so there is one for all tests."""
    path = folder / f"{name}-{layout}-{palette.name}.svg"
    with style.consistent():
        figure = draw(name, palette, layout)
        size = style.save(figure, path)
    return figure, path.read_text(encoding="utf-8"), size


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("figures")


@functools.cache
def words_of(figure):
    """(text, its box on the canvas, y down) of everything written in a drawing."""
    height = figure.get_size_inches()[1] * 72
    figure.set_dpi(72)
    renderer = FigureCanvasAgg(figure).get_renderer()
    found = []
    for text in figure.axes[0].findobj(Text):
        if text.get_text():
            box = text.get_window_extent(renderer)
            found.append((text, (box.x0, height - box.y1, box.x1, height - box.y0)))
    return found


@functools.cache
def boxes_of(figure):
    """(patch, its box) of the filled shapes, the ones on top last."""
    patches = [p for p in figure.axes[0].patches if isinstance(p, FancyBboxPatch | Circle)]
    found = []
    for patch in sorted(patches, key=lambda patch: patch.get_zorder()):
        if isinstance(patch, Circle):
            (x, y), r = patch.center, patch.radius
            found.append((patch, (x - r, y - r, x + r, y + r)))
        else:
            x, y = patch.get_x(), patch.get_y()
            found.append((patch, (x, y, x + patch.get_width(), y + patch.get_height())))
    return found


def under(figure, box):
    """The filled shape that the middle of a text stands on, or None for the paper."""
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    hit = [(patch, b) for patch, b in boxes_of(figure) if b[0] <= x <= b[2] and b[1] <= y <= b[3]]
    return hit[-1] if hit else None


def ratio(one, other):
    def luminance(color):
        parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return sum(
            weight * (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
            for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def is_a_tint(color, palette):
    """Whether a colour is one of the palette's, or one thinned onto its paper."""
    paper, color = to_rgb(palette.paper), to_rgb(color)
    if color in (paper, to_rgb(palette.surface)):
        return True
    for full in map(to_rgb, (palette.ink, palette.muted, palette.line, palette.accent, *palette.experts)):
        shares = [(c - p) / (f - p) for c, p, f in zip(color, paper, full, strict=True) if abs(f - p) > 0.05]
        strength = sum(shares) / len(shares)
        mix = [p + strength * (f - p) for p, f in zip(paper, full, strict=True)]
        if -0.01 <= strength <= 1.01 and max(abs(a - b) for a, b in zip(mix, color, strict=True)) < 0.006:
            return True
    return False


def test_there_are_the_figures_that_the_guide_promises():
    promised = """dense_vs_moe router_anatomy router_order expert_choice group_routing capacity_drops pooled_loss
        load_over_training execution_paths moe_dataflow expert_parallel_flow data_parallel zero_stages tensor_parallel
        sequence_parallel pipeline_schedules context_ring expert_parallel expert_folding device_mesh memory_by_strategy
        fine_grained_experts upcycling offload_cache timeline total_vs_active"""
    assert set(promised.split()) <= set(NAMES)


@each_figure
def test_a_second_drawing_has_the_same_bytes(name, folder, tmp_path):
    for layout, palette in zip(("wide", module(name).LAYOUTS[-1]), PALETTES, strict=True):
        _, first, _ = drawn(name, palette, layout, folder)
        _, second, _ = drawn.__wrapped__(name, palette, layout, tmp_path)
        assert first == second
        assert not re.search(r"<dc:date|Matplotlib v", first), "neither date nor version"


@each_figure
def test_the_palettes_differ_and_nothing_hides_in_the_paper(name, folder):
    light, dark = (drawn(name, palette, "wide", folder)[1] for palette in PALETTES)
    assert light != dark
    assert style.LIGHT.ink in light and style.LIGHT.ink not in dark
    assert style.DARK.ink in dark


@each_figure
def test_it_is_described_in_sentences(name):
    alt = module(name).ALT
    assert len(alt) > 80 and alt.endswith(".") and not alt.lower().startswith(("image", "figure", "picture"))
    assert inspect.getdoc(module(name)), "what it shows, for readers of the code"


@each_figure
def test_it_fits_a_phone_and_needs_no_fonts(name, folder):
    assert module(name).LAYOUTS[0] == "wide"
    _, text, (width, _) = drawn(name, style.DARK, module(name).LAYOUTS[-1], folder)
    assert width <= style.NARROW_WIDTH
    assert "<text" not in text and "http://" not in re.sub(r'xmlns(:\w+)?="[^"]*"|<!DOCTYPE[^>]*>', "", text).replace(
        "http://creativecommons.org/ns#", ""
    ).replace("http://purl.org/dc/dcmitype/StillImage", "")


@each_figure
@pytest.mark.parametrize("layout", ["wide", "narrow"])
def test_its_words_are_on_the_canvas_apart_and_large_enough(name, layout, folder):
    if layout not in module(name).LAYOUTS:
        pytest.skip("one layout serves both")
    figure, _, (width, height) = drawn(name, style.LIGHT, layout, folder)
    assert width <= style.WIDE_WIDTH
    written = words_of(figure)
    outside = [t.get_text() for t, (x0, y0, x1, y1) in written if x0 < 0 or y0 < 0 or x1 > width or y1 > height]
    assert not outside
    small = [t.get_text() for t, _ in written if t.get_fontsize() < 10]
    assert not small, "a phone shows the narrow layout at its own size"
    crossed = [
        (one.get_text(), other.get_text())
        for (one, a), (other, b) in combinations(written, 2)
        if min(a[2], b[2]) - max(a[0], b[0]) > 0.5 and min(a[3], b[3]) - max(a[1], b[1]) > 2.5
    ]
    assert not crossed
    wider = []
    for text, box in written:
        stands = under(figure, box)
        if stands and abs(sum(stands[1][::2]) - box[0] - box[2]) < 1 and box[2] - box[0] > stands[1][2] - stands[1][0]:
            wider.append(text.get_text())
    assert not wider, "wider than the box that they stand in"


@each_figure
@pytest.mark.parametrize("palette", PALETTES, ids=lambda palette: palette.name)
def test_its_colours_are_the_palettes_and_its_words_stand_out(name, palette, folder):
    for layout in module(name).LAYOUTS:
        figure, _, _ = drawn(name, palette, layout, folder)
        faint = {}
        for text, box in words_of(figure):
            stands = under(figure, box)
            ground = to_hex(stands[0].get_facecolor()) if stands else palette.paper
            if ratio(to_hex(text.get_color()), ground) < 4.5:
                faint[text.get_text()] = ground
        assert not faint
        used = {to_hex(patch.get_edgecolor()) for patch in figure.axes[0].patches}
        used |= {to_hex(patch.get_facecolor()) for patch, _ in boxes_of(figure)}
        assert not [color for color in used if not is_a_tint(color, palette)]


@each_figure
def test_the_gallery_shows_it_once_with_a_sentence_and_its_module(name):
    found = re.findall(rf"^!\[(.*)\]\(figure:{name}\)$", GALLERY, re.MULTILINE)
    assert len(found) == 1
    assert 30 < len(found[0]) < 220 and found[0].endswith(".") and not re.search(r"[.!?] [A-Z]", found[0])
    assert f"[`guide_code/figures/{name}.py`](api/guide_code.figures.{name}.md)" in GALLERY


@pytest.mark.parametrize("palette", PALETTES, ids=lambda palette: palette.name)
def test_words_stand_out_from_what_they_stand_on(palette):
    fills = [palette.paper, palette.surface, palette.tint(palette.accent)]
    fills += [palette.tint(color, strength) for color in palette.experts for strength in (0.18, 0.25)]
    assert min(ratio(palette.ink, fill) for fill in fills) >= 4.5
    assert min(ratio(palette.muted, fill) for fill in (palette.paper, palette.surface)) >= 4.5
    assert min(ratio(color, palette.paper) for color in (*palette.experts, palette.accent, palette.line)) >= 3
