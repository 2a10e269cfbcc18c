"""Ideas, models and systems of mixture-of-experts Transformers by date, each with its source."""

from typing import NamedTuple

from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette

LAYOUTS = ("wide", "narrow")


class Event(NamedTuple):
    """One point: for a paper on arXiv the month of its first version."""

    date: str
    """Year, or year and month."""
    kind: str
    """"idea", "model" or "system"."""
    name: str
    what: str
    source: str


EVENTS = (
    Event("1991", "idea", "Adaptive mixtures", "a gate weighs experts", "Jacobs et al., Neural Computation 3(1)"),
    Event("1994", "idea", "Hierarchical mixtures", "a tree of gates", "Jordan and Jacobs, Neural Computation 6(2)"),
    Event("2013-12", "idea", "Deep MoE", "mixtures as layers", "Eigen et al., arXiv:1312.4314"),
    Event("2017-01", "idea", "Sparse MoE layer", "noisy top-k, LSTM", "Shazeer et al., arXiv:1701.06538"),
    Event("2020-06", "model", "GShard", "Transformer, capacity", "Lepikhin et al., arXiv:2006.16668"),
    Event("2021-01", "model", "Switch", "top-1, 1.6 T parameters", "Fedus et al., arXiv:2101.03961"),
    Event("2021-03", "system", "FastMoE", "MoE for PyTorch", "He et al., arXiv:2103.13262"),
    Event("2021-06", "model", "V-MoE", "vision, priority", "Riquelme et al., arXiv:2106.05974"),
    Event("2021-12", "model", "GLaM", "1.2 T, decoder only", "Du et al., arXiv:2112.06905"),
    Event("2022-01", "system", "DeepSpeed-MoE", "training and serving", "Rajbhandari et al., arXiv:2201.05596"),
    Event("2022-02", "model", "ST-MoE", "router z-loss", "Zoph et al., arXiv:2202.08906"),
    Event("2022-02", "idea", "Expert choice", "experts pick tokens", "Zhou et al., arXiv:2202.09368"),
    Event("2022-06", "system", "Tutel", "adaptive parallelism", "Hwang et al., arXiv:2206.03382"),
    Event("2022-07", "model", "NLLB-200", "translation, 54 B", "NLLB team, arXiv:2207.04672"),
    Event("2022-11", "system", "MegaBlocks", "dropless, block-sparse", "Gale et al., arXiv:2211.15841"),
    Event("2022-12", "idea", "Sparse upcycling", "start from a dense model", "Komatsuzaki et al., arXiv:2212.05055"),
    Event("2024-01", "model", "Mixtral 8x7B", "open weights, top-2", "Jiang et al., arXiv:2401.04088"),
    Event("2024-01", "model", "DeepSeekMoE", "fine-grained, shared", "Dai et al., arXiv:2401.06066"),
    Event("2024-03", "system", "ScatterMoE", "no permuted copy", "Tan et al., arXiv:2403.08245"),
    Event("2024-05", "model", "DeepSeek-V2", "236 B, groups", "DeepSeek-AI, arXiv:2405.04434"),
    Event("2024-08", "idea", "Loss-free balancing", "bias on the choice", "Wang et al., arXiv:2408.15664"),
    Event("2024-09", "model", "OLMoE", "open data and code", "Muennighoff et al., arXiv:2409.02060"),
    Event("2024-12", "model", "DeepSeek-V3", "671 B, sigmoid and bias", "DeepSeek-AI, arXiv:2412.19437"),
    Event("2025-01", "idea", "Global-batch loss", "balance over all ranks", "Qiu et al., arXiv:2501.11873"),
    Event("2025-02", "system", "DeepEP", "all-to-all kernels", "github.com/deepseek-ai/DeepEP, first release"),
    Event("2025-04", "model", "Llama 4", "weight on the input", "Meta, announcement of 5 April 2025"),
    Event("2025-04", "system", "Parallel folding", "a mesh for experts", "Liu et al., arXiv:2504.14960"),
    Event("2025-05", "model", "Qwen3", "235 B, 128 experts", "Qwen team, arXiv:2505.09388"),
    Event("2025-07", "model", "Kimi K2", "1 T, 384 experts", "Kimi team, arXiv:2507.20534"),
    Event("2025-08", "model", "GLM-4.5", "355 B, 160 experts", "GLM-4.5 team, arXiv:2508.06471"),
    Event("2025-08", "model", "gpt-oss", "top-4 before softmax", "OpenAI, arXiv:2508.10925"),
    Event("2025-12", "system", "SonicMoE", "less activation memory", "Guo et al., arXiv:2512.14080"),
    Event("2026", "model", "DeepSeek-V4", "hash-routed first layers", "transformers 5.24.0, models/deepseek_v4"),
    Event("2026", "system", "PithTrain", "small 4D training code", "github.com/mlc-ai/pith-train"),
)
"""In order of date."""

ALT = "Ideas, models and systems in order of date. " + " ".join(
    f"{event.date}: {event.name}, {event.what}." for event in EVENTS
)
_COLORS = {"idea": 1, "model": 0, "system": 2}
_ROW = 23.0


def draw(palette: Palette, layout: str) -> Figure:
    """A list in two columns, or in one on a phone."""
    half = (len(EVENTS) + 1) // 2
    parts = [
        Panel("", _ROW * len(events), lambda pen, events=events: _column(pen, events))
        for events in (EVENTS[:half], EVENTS[half:])
    ]
    return panels(palette, layout, [*parts, Panel("", 20, _legend, full=True)])


def _column(pen: Pen, events: tuple[Event, ...]) -> None:
    pen.path([(62, 0), (62, _ROW * len(events))])
    for row, event in enumerate(events):
        y = _ROW * (row + 0.5)
        pen.words(50, y, event.date, size=TINY, align="right", mono=True, muted=True)
        pen.box(57, y - 5, 10, 10, color=pen.expert(_COLORS[event.kind]), strength=1.0, radius=5)
        pen.words(76, y, event.name, size=11, align="left", bold=True)
        pen.words(pen.width - 1, y, event.what, size=10.5, align="right", muted=True)


def _legend(pen: Pen) -> None:
    pen.legend(1, 9, [(f"{kind}s", pen.expert(color), 1.0) for kind, color in _COLORS.items()])
