"""The order of softmax, top-k, normalisation, bias and scaling in the routers of eight published models."""

from typing import NamedTuple

from matplotlib.figure import Figure

from guide_code.figures.shapes import Panel, Pen, panels
from guide_code.figures.style import NARROW_WIDTH, Palette

LAYOUTS = ("wide", "narrow")


class Router(NamedTuple):
    """A router's steps in order, after the matrix product that gives the logits.

    Each step is its words and its kind: "score", "choice", "normalise" or "scale".
    """

    model: str
    steps: tuple[tuple[str, str], ...]
    weight: str
    """What the combine weight multiplies."""
    source: str


_SOFTMAX = ("softmax", "score")
_SUM = ("\u00f7 sum", "normalise")
ROUTERS = (
    Router("Mixtral 8x7B", (_SOFTMAX, ("top 2", "choice"), _SUM), "output",
           "Jiang et al. 2024 (arXiv:2401.04088); transformers modeling_mixtral.py"),
    Router("Qwen3 30B-A3B", (_SOFTMAX, ("top 8", "choice"), _SUM), "output",
           "Qwen3 (arXiv:2505.09388); published config: norm_topk_prob true"),
    Router("OLMoE 1B-7B", (_SOFTMAX, ("top 8", "choice")), "output",
           "Muennighoff et al. 2024 (arXiv:2409.02060); published config: norm_topk_prob false"),
    Router("DeepSeek-V2", (_SOFTMAX, ("3 of 8 groups by max", "choice"), ("top 6", "choice"), ("\u00d7 16", "scale")),
           "output", "DeepSeek-V2 (arXiv:2405.04434); published config: routed_scaling_factor 16"),
    Router("DeepSeek-V3", (("sigmoid", "score"), ("+ bias for the choice", "choice"),
                           ("4 of 8 groups by top-2 sum", "choice"), ("top 8", "choice"), _SUM,
                           ("\u00d7 2.5", "scale")),
           "output", "DeepSeek-V3 (arXiv:2412.19437), eq. 12-16; published config: routed_scaling_factor 2.5"),
    Router("gpt-oss 120b", (("top 4", "choice"), ("softmax over the 4", "score")), "output",
           "OpenAI 2025 (arXiv:2508.10925); gpt_oss/torch/model.py. The logits have a bias"),
    Router("Llama 4", (("top 1", "choice"), ("sigmoid", "score")), "input",
           "transformers modeling_llama4.py"),
    Router("Switch", (_SOFTMAX, ("top 1", "choice"), ("drop beyond capacity", "choice")), "output",
           "Fedus et al. 2021 (arXiv:2101.03961), section 2"),
)  # fmt: skip
"""Facts and where they were read."""

ALT = "The steps of eight routers after the logits. " + " ".join(
    f"{router.model}: {', '.join(words for words, _ in router.steps)}; the weight multiplies the expert's "
    f"{router.weight}."
    for router in ROUTERS
).replace("\u00f7 sum", "divide by the sum").replace("\u00d7", "times").replace("+ bias", "plus bias")  # fmt: skip

_KINDS = {"score": 0, "choice": 1, "normalise": 2, "scale": 3}


def draw(palette: Palette, layout: str) -> Figure:
    """One panel per model, and what the colours mean."""
    parts = [Panel(r.model, _rows(r) * 32 + 6, lambda pen, r=r: _steps(pen, r), _note(r)) for r in ROUTERS]
    return panels(palette, layout, [*parts, Panel("", 20, _legend, full=True)])


def _note(router: Router) -> str:
    return "weight \u00d7 expert output" if router.weight == "output" else "weight \u00d7 expert INPUT"


def _width(words: str) -> float:
    return 14 + 6.2 * len(words)


def _lines(router: Router) -> list[list[tuple[str, str]]]:
    """The steps in lines that fit a panel."""
    lines: list[list[tuple[str, str]]] = [[]]
    for step in router.steps:
        if sum(_width(words) + 17 for words, _ in [*lines[-1], step]) > NARROW_WIDTH + 8:
            lines.append([])
        lines[-1].append(step)
    return lines


def _rows(router: Router) -> int:
    return len(_lines(router))


def _steps(pen: Pen, router: Router) -> None:
    lines = _lines(router)
    pen.area(0, 0, pen.width, 32 * len(lines) + 4)
    for row, line in enumerate(lines):
        x, y = 6.0, 5 + 32 * row
        for number, (words, kind) in enumerate(line):
            width = _width(words)
            pen.box(x, y, width, 25, words, color=pen.expert(_KINDS[kind]), strength=0.25)
            if number + 1 < len(line) or row + 1 < len(lines):
                pen.arrow((x + width + 2, y + 12.5), (x + width + 15, y + 12.5))
            x += width + 17


def _legend(pen: Pen) -> None:
    names = ("scores", "choice", "normalise", "scale")
    pen.legend(1, 9, [(name, pen.expert(number), 0.5) for number, name in enumerate(names)])
