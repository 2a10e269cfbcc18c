"""Execution of notebooks: when, how, and what a failure says. Known failure S-05 is here."""

import os
import time

import nbformat
import pytest
from site_project import HELLO

from guide_code.sitebuild.notebooks import KEPT_PER_NOTEBOOK, NotebookError, execute_all, notebook_key

HEADER = "# ---\n# jupyter:\n#   guide:\n#     timeout: {}\n# ---\n\n# %% [markdown]\n# # Title\n\n"


def quiet(line):
    pass


def set_notebook(project, code, timeout=60):
    path = project / "notebooks" / "hello.py"
    path.write_text(HEADER.format(timeout) + code)
    return path


def failure(project):
    with pytest.raises(NotebookError) as error:
        execute_all(project, say=quiet)
    assert not list((project / ".cache" / "notebooks").glob("*.ipynb")), "a failed run must not be cached"
    return str(error.value)


def test_runs_once_and_again_only_when_something_that_it_uses_changes(project):
    first = execute_all(project, say=quiet)
    assert [item.ran for item in first] == [True]
    assert [item.ran for item in execute_all(project, say=quiet)] == [False]

    (project / "guide_code" / "demo.py").write_text('"""Changed."""\n\n\ndef answer():\n    return 43\n')
    again = execute_all(project, say=quiet)
    assert [item.ran for item in again] == [True]
    assert "answer 43" in again[0].path.read_text()
    assert again[0].path != first[0].path


def test_the_key_covers_what_could_change_the_outputs_and_nothing_else(project):
    source = project / "notebooks" / "hello.py"
    demo = project / "guide_code" / "demo.py"
    keys = [notebook_key(source, project)]

    (project / "guide_code" / "other.py").write_text('"""Not used by the notebook."""\n')
    assert notebook_key(source, project) == keys[0]

    demo.write_text("from guide_code import other\n" + demo.read_text())
    keys.append(notebook_key(source, project))
    (project / "guide_code" / "other.py").write_text('"""Used through demo now."""\n')
    keys.append(notebook_key(source, project))
    (project / "constraints.txt").write_text("nothing==2\n")
    keys.append(notebook_key(source, project))
    source.write_text(HELLO + "\n# %%\n1\n")
    keys.append(notebook_key(source, project))
    assert len(set(keys)) == len(keys)


def test_an_error_names_notebook_cell_and_cause(project):
    set_notebook(project, "# %%\nx = 1\n\n# %%\n# divide\nx / 0\n")
    message = failure(project)
    assert message.startswith("hello.py, cell 3 (# divide) raised ZeroDivisionError")
    assert "x / 0" in message and "\x1b" not in message


def test_the_time_limit_of_the_notebook_holds_over_all_its_cells(project):
    set_notebook(project, "# %%\nimport time\ntime.sleep(1.2)\n\n# %%\ntime.sleep(60)\n", timeout=2)
    start = time.monotonic()
    message = failure(project)
    assert "hello.py, cell 3" in message and "limit of 2 s" in message and "guide.timeout" in message
    assert time.monotonic() - start < 20


def test_a_time_limit_that_is_none_is_refused(project):
    set_notebook(project, "# %%\n1\n", timeout="soon")
    assert "guide.timeout is 'soon'" in failure(project)


def test_a_kernel_that_dies_is_reported(project):
    set_notebook(project, "# %%\nimport os\nos._exit(3)\n")
    assert "hello.py, cell 2" in (message := failure(project)) and "kernel died" in message


def test_an_image_needs_alternative_text(project):
    draw = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\n"
    set_notebook(project, f"# %%\n{draw}")
    message = failure(project)
    assert "hello.py, cell 2" in message and '# %% alt="..."' in message
    set_notebook(project, f'# %% alt=["one", "two"]\n{draw}')
    assert "1 image(s) and has 2 alternative text(s)" in failure(project)


def test_stderr_is_told_and_left_out_of_the_page(project):
    code = "import sys\nprint('shown')\nprint('hidden', file=sys.stderr)\n"
    set_notebook(project, f'# %%\n{code}\n# %% tags=["keep-stderr"]\nprint("kept", file=sys.stderr)\n')
    lines = []
    (item,) = execute_all(project, say=lines.append)
    notebook = nbformat.read(item.path, as_version=4)
    shown = [output.text for cell in notebook.cells for output in cell.get("outputs", [])]
    assert shown == ["shown\n", "kept\n"]
    told = [line for line in lines if "hidden" in line]
    assert len(told) == 1 and "hello.py, cell 2" in told[0]
    lines.clear()
    execute_all(project, say=lines.append)
    assert any("hidden" in line for line in lines), "a warning must not vanish because nothing ran"


def test_foreign_kernels_and_file_times_change_nothing(project):
    """S-05: the kernel named in the header exists on no machine, and a clone sets file times at random."""
    assert "my-laptop-env" in HELLO
    source = project / "notebooks" / "hello.py"
    before = source.read_bytes()
    (first,) = execute_all(project, say=quiet)
    kernel = nbformat.read(first.path, as_version=4).metadata.kernelspec
    assert (kernel.name, kernel.display_name) == ("python3", "Python 3")

    for number, file in enumerate(sorted(project.rglob("*.py"))):
        os.utime(file, (number, 2_000_000_000 - number))
    (second,) = execute_all(project, say=quiet)
    assert not second.ran and second.path == first.path
    assert source.read_bytes() == before
    assert [path.name for path in (project / "notebooks").iterdir()] == ["hello.py"], "nothing is written beside it"


def test_what_a_notebook_writes_stays_out_of_the_tree(project):
    set_notebook(project, "# %%\nopen('left.txt', 'w').close()\n")
    execute_all(project, say=quiet)
    places = [path.relative_to(project).parts[0] for path in project.rglob("left.txt")]
    assert places == [".cache"]


def test_facts_of_the_run_are_stored(project):
    set_notebook(project, "# %%\n1\n")
    (item,) = execute_all(project, say=quiet)
    facts = nbformat.read(item.path, as_version=4).metadata.guide
    assert facts.seconds > 0 and "CPU core" in facts.hardware and len(facts.date) == 10


def test_a_preview_keeps_outputs_of_unchanged_text_and_marks_them(project):
    set_notebook(project, "# %%\nfrom guide_code import demo\nprint(demo.answer())\n")
    execute_all(project, say=quiet)
    (project / "guide_code" / "demo.py").write_text('"""Broken."""\nraise RuntimeError\n')
    (item,) = execute_all(project, allow_stale=True, say=quiet)
    assert item.stale and not item.ran
    set_notebook(project, "# %%\nfrom guide_code import demo\nprint('new')\n")
    with pytest.raises(NotebookError, match="RuntimeError"):
        execute_all(project, allow_stale=True, say=quiet)


def test_old_versions_and_removed_notebooks_leave_the_cache(project):
    cache = project / ".cache" / "notebooks"
    cache.mkdir(parents=True)
    for number in range(KEPT_PER_NOTEBOOK + 2):
        old = cache / f"hello-{number:020}.ipynb"
        old.write_text("{}")
        os.utime(old, (number, number))
    (cache / "gone-0123456789.ipynb").write_text("{}")
    set_notebook(project, "# %%\n1\n")
    (item,) = execute_all(project, say=quiet)
    left = sorted(path.name for path in cache.glob("*.ipynb"))
    newest = [f"hello-{number:020}.ipynb" for number in range(3, KEPT_PER_NOTEBOOK + 2)]
    assert left == sorted([*newest[-(KEPT_PER_NOTEBOOK - 1) :], item.path.name])
