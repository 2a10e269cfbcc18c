"""What a site needs to be read from disk (`file://`), where a browser fetches nothing and starts no workers."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

_WORKER = "assets/javascripts/iframe-worker.js"


def make_offline(config: MkDocsConfig) -> None:
    """Changes the configuration: links to files and not folders, no navigation by fetching, no workers."""
    config.use_directory_urls = False
    features = [name for name in config.theme["features"] if not name.startswith("navigation.instant")]
    config.theme["features"] = features
    config.extra["polyfills"] = [*config.extra.get("polyfills", []), _WORKER]


def write_search_script(site: Path) -> None:
    """Writes the search index as a script, since a page on disk cannot fetch the JSON file."""
    index = site / "search" / "search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text(encoding='utf-8')}", encoding="utf-8")
