import nbformat
import pytest
import yaml
from site_project import ROOT

from guide_code.sitebuild import __main__ as command
from guide_code.sitebuild.build import build_site
from guide_code.sitebuild.colab import BRANCH, colab_url
from guide_code.sitebuild.notebooks import execute_all


def test_a_notebook_for_colab_installs_the_package_first_and_keeps_its_outputs(drawn_project, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "ROOT", drawn_project)
    into = tmp_path / "colab"
    assert command.main(["colab", str(into), "--repository", "owner/guide", "--revision", "abc123"]) == 0
    executed = execute_all(drawn_project, say=lambda line: None)
    assert {path.stem for path in into.iterdir()} == {item.source.stem for item in executed}
    for item in executed:
        notebook = nbformat.read(into / f"{item.source.stem}.ipynb", as_version=4)
        nbformat.validate(notebook)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert "git+https://github.com/owner/guide@abc123" in code[0].source and code[0].source.count("%pip") == 1
        before = nbformat.read(item.path, as_version=4)
        assert code[1:] == [cell for cell in before.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("wrong", ["owner", "https://github.com/owner/guide", "owner/guide/x", "owner/gui de", ""])
def test_a_repository_is_owner_and_name(wrong):
    with pytest.raises(ValueError, match="OWNER/NAME"):
        colab_url(wrong, "01_first_moe")


def test_the_button_is_there_when_the_site_has_a_repository(drawn_project, monkeypatch):
    pages = {}
    for repository in ("", "owner/guide"):
        monkeypatch.setenv("GUIDE_REPOSITORY", repository)
        site = build_site(drawn_project, say=lambda line: None)
        pages[repository] = next((site / "tutorials").glob("*/index.html")).read_text(encoding="utf-8")
    assert "colab.research" not in pages[""]
    assert f"https://colab.research.google.com/github/owner/guide/blob/{BRANCH}/" in pages["owner/guide"]


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_what_the_forge_reads_is_yaml_with_what_it_needs(path):
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.parent.name == "workflows":
        jobs = content["jobs"].values()
        assert all("timeout-minutes" in job for job in jobs), "nothing hangs"
        steps = [step for job in jobs for step in job["steps"]]
        assert all(("uses" in step) != ("run" in step) for step in steps)
        assert content["permissions"], "no more rights than needed"
    elif path.name != "config.yml":
        assert {"name", "description", "body"} <= content.keys()
        assert all(item["attributes"]["label"] for item in content["body"])


def test_the_deploy_workflow_pushes_to_the_branch_that_the_button_opens():
    text = (ROOT / ".github/workflows/pages.yml").read_text(encoding="utf-8")
    assert f"git init -q -b {BRANCH}" in text and text.rstrip().endswith(BRANCH)
