"""Device meshes in three and four dimensions: every rank has one coordinate in each, and one group along each."""

from itertools import product

from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Panel, Pen, coordinates, panels
from guide_code.figures.style import Palette

MESHES = {"3D": {"tp": 2, "dp": 4, "pp": 2}, "4D": {"tp": 2, "cp": 2, "dp": 2, "pp": 2}}
"""Sizes, the dimension whose neighbours have consecutive ranks first: it talks the most, so it stays in one machine."""
RANK = 5
LAYOUTS = ("wide", "narrow")


def groups(name: str, rank: int = RANK) -> dict[str, list[int]]:
    """Along each dimension the ranks that share all other coordinates with `rank`."""
    mesh = MESHES[name]
    own = coordinates(rank, mesh)
    count = 1
    for size in mesh.values():
        count *= size
    return {
        along: [r for r in range(count) if all(coordinates(r, mesh)[d] == own[d] for d in mesh if d != along)]
        for along in mesh
    }


def _said(name: str) -> str:
    return "; ".join(f"{along} with ranks {', '.join(map(str, ranks))}" for along, ranks in groups(name).items())


ALT = (
    "Sixteen ranks in two meshes. 3D: two pipeline stages of eight ranks, in each four data-parallel rows of two "
    f"tensor-parallel neighbours; rank {RANK} works in {_said('3D')}. 4D: context parallelism of two comes between "
    f"tensor and data; rank {RANK} works in {_said('4D')}."
)
_COLORS = {"tp": 0, "cp": 3, "dp": 2, "pp": 1}


def draw(palette: Palette, layout: str) -> Figure:
    """A panel per mesh."""
    notes = {name: " \u00d7 ".join(f"{along} {size}" for along, size in mesh.items()) for name, mesh in MESHES.items()}
    parts = [Panel(f"{name} mesh", 290, lambda pen, name=name: _mesh(pen, name), notes[name]) for name in MESHES]
    return panels(palette, layout, parts)


def _mesh(pen: Pen, name: str) -> None:
    mesh, near = MESHES[name], groups(name)
    contexts = mesh.get("cp", 1)
    for stage in range(mesh["pp"]):
        left = 174 * stage
        pen.area(left, 0, 166, 178)
        pen.words(left + 83, 12, f"pipeline stage {stage}", size=TINY, muted=True)
    for tp, cp, dp, pp in product(range(mesh["tp"]), range(contexts), range(mesh["dp"]), range(mesh["pp"])):
        at = {"tp": tp, "dp": dp, "pp": pp} | ({"cp": cp} if contexts > 1 else {})
        rank, step = 0, 1
        for along, size in mesh.items():
            rank, step = rank + at[along] * step, step * size
        x = 174 * pp + 38 + 62 * tp
        y = 24 + 38 * (dp * contexts + cp)
        color = next((pen.expert(_COLORS[along]) for along, ranks in near.items() if rank in ranks), None)
        if rank == RANK:
            color = pen.palette.accent
        pen.box(x, y, 56, 32, str(rank), color=color, strength=0.5 if rank == RANK else 0.3, bold=rank == RANK, size=13)
        if tp == 0:
            label = f"dp {dp}" + (f"\ncp {cp}" if contexts > 1 else "")
            pen.words(174 * pp + 20, y + 16, label, size=TINY, muted=True)
    pen.words(0, 197, f"the groups of rank {RANK}", size=11, align="left", bold=True)
    for row, (along, ranks) in enumerate(near.items()):
        y = 217 + 20 * row
        pen.box(0.6, y - 7, 14, 14, color=pen.expert(_COLORS[along]), strength=0.3, radius=2)
        what = {"tp": "matrices", "cp": "sequence", "dp": "batch", "pp": "layers"}[along]
        text = f"{along}: ranks {', '.join(map(str, ranks))} split the {what}"
        pen.words(22, y, text, size=10.5, align="left")
