import dataclasses
import tomllib

import pytest
from bs4 import BeautifulSoup
from site_project import ROOT

from guide_code.config import ModelConfig, MoEConfig
from guide_code.sitebuild import systems
from guide_code.sitebuild.systems import load_names, load_systems, names_of, systems_sources, systems_table

SYSTEMS, NAMES = ROOT / systems.SYSTEMS, ROOT / systems.NAMES


def test_every_cell_has_a_value_a_source_and_a_date():
    columns, rows = load_systems(SYSTEMS)
    assert len(rows) >= 17 and all(row.cells.keys() == columns.keys() for row in rows)
    names = {row.name for row in rows}
    assert {"GShard", "GLaM", "Megatron-Core", "torchtitan", "transformers", "DeepEP", "vLLM", "SGLang"} <= names
    raw = tomllib.loads(SYSTEMS.read_text(encoding="utf-8"))["systems"].values()
    for row, entry in zip(rows, raw, strict=True):
        assert row.url.startswith("https://")
        for column, cell in row.cells.items():
            assert [cell.value, cell.source, cell.date] == entry[column]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('kind = ["kernels", "README"]', "kind"),
        ('kind = ["kernels", "", "2026-08"]', "none of them empty"),
        ('kind = ["kernels", "README", "last week"]', "last week"),
        ('kind = ["kernels", "README", "2026-13"]', "2026-13"),
        ('colour = ["red", "README", "2026-08"]', "colour, kind"),
    ],
)
def test_a_bad_cell_is_named(tmp_path, line, words):
    path = tmp_path / "systems.toml"
    path.write_text(f'[columns]\nkind = "Kind"\n[systems.x]\nname = "X"\nurl = "https://example.org"\n{line}\n')
    with pytest.raises(ValueError, match=words):
        load_systems(path)


def test_the_table_shows_every_cell_with_its_source_and_escapes_it(tmp_path):
    path = tmp_path / "systems.toml"
    path.write_text(
        '[columns]\nkind = "Kind"\n[systems.x]\nname = "A & B"\nurl = "https://example.org"\n'
        'kind = ["<kernels>", "the \\"README\\"", "2026-08"]\n'
    )
    page = BeautifulSoup(systems_table(path), "html.parser")
    (name,), (cell,), (head,) = (page.select(path) for path in ("tbody th a", "tbody td", "thead th[data-column]"))
    assert name.get_text() == "A & B"
    assert cell.get_text() == "<kernels>" and cell["title"] == 'the "README", 2026-08'
    assert cell["data-column"] == head["data-column"] == "kind"
    assert 'Kind: the "README", 2026-08' in systems_sources(path)


def test_names_that_are_ours_exist():
    heads, rows = load_names(NAMES)
    assert heads[1] == "moe-guide"
    ours = {field.name for cls in (ModelConfig, MoEConfig) for field in dataclasses.fields(cls)}
    for row in rows:
        names = names_of(row[1])
        assert names and set(names) <= ours, f"{row[0]}: {row[1]} is no field"


def test_a_row_of_another_length_is_named(tmp_path):
    path = tmp_path / "names.toml"
    path.write_text('systems = ["a", "b"]\nnames = [["width", "x"]]\n')
    with pytest.raises(ValueError, match="'width' has 2 entries"):
        load_names(path)
