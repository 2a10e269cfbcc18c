"""Folding: the same eight ranks form one mesh for attention and another for the experts.

Liu et al. 2025, MoE Parallel Folding (arXiv:2504.14960). The sizes of each mesh multiply to the same number of ranks.
"""

from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Panel, Pen, coordinates, panels
from guide_code.figures.style import Palette

RANKS, NUM_EXPERTS = 8, 8
MESHES = {
    "Attention: TP 2, DP 4": {"tp": 2, "dp": 4},
    "Experts: EP 8": {"ep": 8},
    "Experts: EP 4, EDP 2": {"ep": 4, "edp": 2},
    "Experts: ETP 2, EP 4": {"etp": 2, "ep": 4},
}
"""Sizes of each mesh, the dimension whose neighbours have consecutive ranks first."""
_NOTES = ("half of each matrix", "one expert each", "two copies of each expert", "experts cut in half")
LAYOUTS = ("wide", "narrow")
ALT = (
    "The same eight ranks under four meshes. Attention with TP 2 and DP 4: ranks 0 and 1 hold the two halves of each "
    "matrix for data part 0, ranks 2 and 3 for part 1, and so on. Experts with EP 8: rank r holds expert r. Experts "
    "with EP 4 and EDP 2: ranks 0 to 3 hold experts 0-1, 2-3, 4-5 and 6-7, ranks 4 to 7 hold copies. Experts with ETP "
    "2 and EP 4: ranks 0 and 1 hold the two halves of experts 0-1, ranks 2 and 3 those of experts 2-3, and so on."
)


def holds(mesh: dict[str, int], rank: int) -> str:
    """What a rank has under a mesh, in words."""
    at = coordinates(rank, mesh)
    if "tp" in at:
        return f"columns {at['tp']}\ndata {at['dp']}"
    each = NUM_EXPERTS // mesh["ep"]
    first = at["ep"] * each
    experts = f"$E_{first}$" if each == 1 else f"$E_{first}$, $E_{first + 1}$"
    if "etp" in at:
        return f"{experts}\nhalf {at['etp']}"
    return f"{experts}\ncopy {at['edp']}" if "edp" in at else experts


def draw(palette: Palette, layout: str) -> Figure:
    """One panel per mesh."""
    parts = [
        Panel(title, 160, lambda pen, mesh=mesh: _mesh(pen, mesh), note)
        for (title, mesh), note in zip(MESHES.items(), _NOTES, strict=True)
    ]
    return panels(palette, layout, parts)


def _mesh(pen: Pen, mesh: dict[str, int]) -> None:
    pen.area(0, 0, pen.width, 158)
    for rank in range(RANKS):
        x, y = 6 + 83 * (rank % 4), 6 + 75 * (rank // 4)
        at = coordinates(rank, mesh)
        group = at["dp"] if "dp" in at else at["ep"] % 4
        second = at.get("edp", 0) or at.get("etp", 0) or at.get("tp", 0) or at.get("ep", 0) >= 4
        pen.box(x, y, 78, 70, color=pen.expert(group), strength=0.2 if second else 0.45)
        pen.words(x + 39, y + 13, f"rank {rank}", size=TINY, bold=True)
        pen.words(x + 39, y + 43, holds(mesh, rank), size=11)
