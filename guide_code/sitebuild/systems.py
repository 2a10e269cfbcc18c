"""Tables of the Solutions pages: systems from docs/data/systems.toml, names from docs/data/names.toml, the presets.

A cell of a system is `[value, source, date read]`. The source shows on hovering, and in full below the table.
"""

import re
import tomllib
from dataclasses import dataclass
from html import escape
from pathlib import Path

from guide_code.models import Cost, costs
from guide_code.presets import preset

SYSTEMS = Path("docs/data/systems.toml")
NAMES = Path("docs/data/names.toml")
_DATE = re.compile(r"\d{4}-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?")


@dataclass(frozen=True)
class Cell:
    """One fact about a system."""

    value: str
    """In our words; "?" where it is not known."""
    source: str
    date: str
    """When the source was read or, for a paper, first published: year and month, or a day."""


@dataclass(frozen=True)
class System:
    """A row of the table."""

    name: str
    url: str
    cells: dict[str, Cell]


def load_systems(path: Path = SYSTEMS) -> tuple[dict[str, str], list[System]]:
    """The titles of the columns by key, and the systems.

    Raises:
        ValueError: a system lacks a column or has an unknown one, or a cell lacks value, source or date.
    """
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    columns, systems = data["columns"], []
    for key, entry in data["systems"].items():
        where = f"{path.name}, [systems.{key}]"
        wrong = (columns.keys() | {"name", "url"}) ^ entry.keys()
        if wrong:
            raise ValueError(f"{where}: missing or unknown {', '.join(sorted(wrong))}; give every column once")
        cells = {}
        for column in columns:
            cell = entry[column]
            if not isinstance(cell, list) or len(cell) != 3 or not all(isinstance(x, str) and x.strip() for x in cell):
                raise ValueError(f"{where}: {column} = {cell!r} must be [value, source, date], none of them empty")
            if not _DATE.fullmatch(cell[2]):
                raise ValueError(f"{where}: {column} has the date {cell[2]!r}; write 2026-08 or 2026-08-21")
            cells[column] = Cell(*cell)
        systems.append(System(entry["name"], entry["url"], cells))
    return columns, systems


def systems_table(path: Path = SYSTEMS) -> str:
    """The table as HTML, whole without its script, which adds the filters."""
    columns, systems = load_systems(path)
    head = "".join(f'<th data-column="{key}">{escape(title)}</th>' for key, title in columns.items())
    rows = []
    for system in systems:
        cells = "".join(
            f'<td data-column="{key}" title="{escape(f"{cell.source}, {cell.date}")}">{escape(cell.value)}</td>'
            for key, cell in system.cells.items()
        )
        rows.append(f'<tr><th scope="row"><a href="{escape(system.url)}">{escape(system.name)}</a></th>{cells}</tr>')
    table = f"<thead><tr><th>System</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div id="systems-tool"></div><table id="systems-table">{table}</table>'


def systems_sources(path: Path = SYSTEMS) -> str:
    """The source and date of every cell, as Markdown, folded system by system."""
    columns, systems = load_systems(path)
    parts = []
    for system in systems:
        lines = [f"    - {columns[key]}: {cell.source}, {cell.date}" for key, cell in system.cells.items()]
        parts.append(f'??? note "{system.name}"\n\n' + "\n".join(lines))
    return "\n\n".join(parts)


def load_names(path: Path = NAMES) -> tuple[list[str], list[list[str]]]:
    """The heads and the rows of the name map; a row is the concept and its name in each system, "" where it has none.

    Raises:
        ValueError: a row has another number of names than there are systems.
    """
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    heads = ["Concept", *data["systems"]]
    for row in data["names"]:
        if len(row) != len(heads):
            raise ValueError(f"{path.name}: {row[0]!r} has {len(row)} entries; give one for each of {', '.join(heads)}")
    return heads, data["names"]


def name_table(path: Path = NAMES) -> str:
    """The name map as Markdown."""
    heads, rows = load_names(path)
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for concept, *names in rows:
        code = [", ".join(f"`{name}`" for name in names_of(cell)) or "none" for cell in names]
        lines.append(f"| {concept} | {' | '.join(code)} |")
    return "\n".join(lines)


def names_of(cell: str) -> list[str]:
    """The names in a cell of the name map."""
    return [name.strip() for name in cell.split(",") if name.strip()]


def models_table() -> str:
    """The presets with their sizes, as Markdown; a star marks those with a value that was not verified."""
    lines = [
        "| Model | Total | Active | Layers (dense first) | Experts | Per token | Expert width | Shared width "
        "| Scores | Normalised | Scale | Groups | bfloat16 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|---|--:|--:|--:|",
    ]
    lines += [_model(row) for row in costs() if row.name not in ("tiny", "small")]
    return "\n".join(lines)


def _model(row: Cost) -> str:
    config = preset(row.name, allow_unverified=True)
    moe = config.moe
    assert moe is not None
    dense = f" ({config.first_k_dense})" if config.first_k_dense else ""
    groups = f"{moe.top_k_groups} of {moe.num_groups}" if moe.num_groups > 1 else "none"
    cells = [
        f"`{row.name}`{'*' if row.unverified else ''}",
        f"{row.total_parameters / 1e9:.1f} B",
        f"{row.active_parameters / 1e9:.1f} B",
        f"{config.num_layers}{dense}",
        f"{moe.num_experts}",
        f"{moe.top_k}",
        f"{moe.moe_intermediate_size:,}",
        f"{moe.shared_width:,}" if moe.shared_width else "none",
        moe.score_fn,
        "yes" if moe.norm_topk_prob else "no",
        f"{moe.routed_scaling_factor:g}",
        groups,
        f"{row.bytes['bfloat16'] / 1e9:,.0f} GB",
    ]
    return f"| {' | '.join(cells)} |"
