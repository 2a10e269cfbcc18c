import pytest

from guide_code.sitebuild.imports import import_closure, imported_files, module_file

FILES = {
    "pack/__init__.py": '"""A package."""',
    "pack/a.py": "from pack.sub import deep",
    "pack/b.py": "def later():\n    import pack.c",
    "pack/c.py": "",
    "pack/unused.py": "",
    "pack/sub/__init__.py": "",
    "pack/sub/deep.py": "from . import near\nfrom ..b import later",
    "pack/sub/near.py": "import torch, os.path",
    "run.py": "import pack.a",
    "shell.py": 'command = ["python", "-m", "pack.c"]',
}


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(files, root):
    return {file.relative_to(root.resolve()).as_posix() for file in files}


def test_direct_imports_include_the_packages_on_the_way(root):
    assert names(imported_files(root / "run.py", root), root) == {"pack/__init__.py", "pack/a.py"}


def test_a_name_imported_from_a_package_may_be_a_module(root):
    found = names(imported_files(root / "pack/a.py", root), root)
    assert found == {"pack/__init__.py", "pack/sub/__init__.py", "pack/sub/deep.py"}


def test_relative_imports_and_imports_in_functions_count(root):
    found = names(imported_files(root / "pack/sub/deep.py", root), root)
    assert found == {"pack/__init__.py", "pack/b.py", "pack/sub/__init__.py", "pack/sub/near.py"}
    assert names(imported_files(root / "pack/b.py", root), root) == {"pack/__init__.py", "pack/c.py"}


def test_the_closure_reaches_through_others_and_stops_at_the_project(root):
    found = names(import_closure(root / "run.py", root), root)
    assert found == set(FILES) - {"run.py", "shell.py", "pack/unused.py"}


def test_module_names_in_strings_count_only_when_asked(root):
    assert imported_files(root / "shell.py", root) == set()
    found = names(imported_files(root / "shell.py", root, names_in_strings=True), root)
    assert found == {"pack/__init__.py", "pack/c.py"}


def test_a_cycle_ends(root):
    (root / "pack/c.py").write_text("import pack.b")
    assert "pack/b.py" in names(import_closure(root / "pack/c.py", root), root)


def test_a_file_that_is_not_python_is_named(root):
    (root / "run.py").write_text("def (")
    with pytest.raises(SyntaxError) as error:
        imported_files(root / "run.py", root)
    assert error.value.filename and error.value.filename.endswith("run.py")


def test_module_file_knows_packages_and_strangers(root):
    assert module_file("pack", root) == root / "pack" / "__init__.py"
    assert module_file("torch", root) is None
