"""Values of `mkdocs.yml` that promises of the guide rest on."""

import os
import subprocess
import sys

import pytest
import yaml
from site_project import ROOT

os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")

from mkdocs.config import load_config

from guide_code.sitebuild.hooks import expand_navigation


@pytest.fixture(scope="module")
def config():
    return load_config(str(ROOT / "mkdocs.yml"))


def plugin(config, name):
    return config.plugins[name].config


def test_every_warning_stops_the_build(config):
    assert config.strict
    levels = [*config.validation.nav.values(), *config.validation.links.values()]
    assert levels and set(levels) == {30}, "30 is logging.WARNING"


def test_nothing_is_fetched_from_another_host(config):
    assert config.theme["font"] is False
    assert config.extra["generator"] is False
    assert config.repo_url is None, "with it the theme asks the forge for stars"
    assert "analytics" not in config.extra and "privacy" not in config.plugins
    scripts = [str(script) for script in config.extra_javascript]
    assert not [url for url in [*config.extra_css, *scripts] if "//" in url]
    assert plugin(config, "mkdocs-jupyter")["custom_mathjax_url"] == "none"
    assert plugin(config, "mkdocstrings").handlers["python"]["inventories"] == []


def test_mkdocs_jupyter_renders_and_never_runs(config):
    jupyter = plugin(config, "mkdocs-jupyter")
    assert jupyter["execute"] is False and jupyter["allow_errors"] is False
    assert jupyter["cache"] is False, "its key ignores the code that a notebook imports"
    assert jupyter["include"] == ["tutorials/*.ipynb"]


def test_code_is_read_and_not_imported_for_the_reference(config):
    options = plugin(config, "mkdocstrings").handlers["python"]["options"]
    assert options["allow_inspection"] is False and options["docstring_style"] == "google"
    assert options["show_source"] is True


def test_both_palettes_follow_the_system_until_the_reader_chooses(config):
    media = [palette["media"] for palette in config.theme["palette"]]
    assert media == ["(prefers-color-scheme)", "(prefers-color-scheme: light)", "(prefers-color-scheme: dark)"]
    assert [palette.get("scheme") for palette in config.theme["palette"]] == [None, "default", "slate"]


def test_the_theme_copies_code_and_navigates_without_reloads(config):
    assert {"content.code.copy", "navigation.instant"} <= set(config.theme["features"])


def test_mathematics_is_marked_for_one_renderer(config):
    assert config.mdx_configs["pymdownx.arithmatex"]["generic"] is True


def test_the_sections_are_those_of_the_design(config):
    assert [next(iter(entry)) for entry in config.nav] == [
        "Home",
        "Learn",
        "Parallelism",
        "Solutions",
        "Tutorials",
        "Tools",
        "How-to",
        "Reference",
    ]


def test_patterns_of_the_navigation_list_generated_pages_in_order():
    nav = [{"A": "a.md"}, {"T": ["t/*"]}, {"R": ["r.md", {"API": ["r/*"]}]}]
    assert expand_navigation(nav, ["t/1.ipynb", "t/2.ipynb", "r/x.md"]) == [
        {"A": "a.md"},
        {"T": ["t/1.ipynb", "t/2.ipynb"]},
        {"R": ["r.md", {"API": ["r/x.md"]}]},
    ]


def test_committed_notebooks_are_scripts_only():
    """S-05: one source of truth, without outputs."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    suffixes = (".ipynb", ".png", ".jpg", ".jpeg", ".svg", ".gif", ".webp", ".pdf")
    assert not [name for name in listed.stdout.splitlines() if name.endswith(suffixes)]


@pytest.mark.parametrize("source", sorted((ROOT / "notebooks").glob("*.py")), ids=lambda path: path.name)
def test_a_notebook_survives_a_round_trip_through_jupyter(source):
    """S-05: opening and saving it in Jupyter leaves no difference."""
    import jupytext

    def parts(text):
        _, header, body = text.split("# ---\n", 2)
        metadata = yaml.safe_load("\n".join(line[2:] for line in header.splitlines()))["jupyter"]
        metadata.pop("jupytext")  # versions, and the list of the fields below that Jupyter shall keep
        return metadata, body.rstrip()

    text = source.read_text(encoding="utf-8")
    assert parts(text)[0]["kernelspec"]["name"] == "python3"
    notebook = jupytext.reads(text, fmt="py:percent")
    saved = jupytext.reads(jupytext.writes(notebook, fmt="ipynb"), fmt="ipynb")
    assert parts(jupytext.writes(saved, fmt="py:percent")) == parts(text)


def test_mkdocs_alone_says_how_to_build(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode and "make site" in result.stderr
