import re
from collections import Counter

import pytest
from site_project import ROOT

from guide_code.sitebuild.api import public_modules, write_api_pages


def expected_modules():
    """Public modules found in another way than the build finds them."""
    for path in (ROOT / "guide_code").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        only_a_docstring = path.name == "__init__.py" and "import" not in path.read_text(encoding="utf-8")
        if not only_a_docstring and not re.search(r"\._(?!_init__)", name):
            yield name.removesuffix(".__init__")


def test_each_public_module_is_on_exactly_one_page(tmp_path):
    pages = [item.path for item in write_api_pages(ROOT / "guide_code", tmp_path)]
    pages += (ROOT / "docs" / "reference").rglob("*.md")
    shown = Counter(
        name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert shown == Counter(expected_modules())


def test_the_index_lists_and_describes_every_module(tmp_path):
    index = write_api_pages(ROOT / "guide_code", tmp_path)[0].path.read_text(encoding="utf-8")
    for module in public_modules(ROOT / "guide_code"):
        assert f"]({module.name}.md) | {module.summary} |" in index


def test_a_page_offers_its_file_and_a_package_that_re_exports_repeats_no_name(package, tmp_path):
    mounted = {item.uri: item.path for item in write_api_pages(package, tmp_path)}
    assert mounted["source/pack/sub/a.py"] == package / "sub/a.py"
    page = mounted["reference/api/pack.sub.a.md"].read_text()
    assert "[a.py](../../source/pack/sub/a.py){ download }, 5 lines" in page and "members" not in page
    assert "members: false" in mounted["reference/api/pack.sub.md"].read_text()


@pytest.fixture
def package(tmp_path):
    package = tmp_path / "pack"
    (package / "sub").mkdir(parents=True)
    (package / "sitebuild").mkdir()
    (package / "__init__.py").write_text('"""Only words."""\n')
    (package / "sub" / "__init__.py").write_text('"""Gathers."""\nfrom pack.sub.a import x\n')
    (package / "sub" / "a.py").write_text('"""First line.\n\nMore.\n"""\nx = 1\n')
    (package / "sub" / "_private.py").write_text("x = 1\n")
    (package / "sitebuild" / "tool.py").write_text('"""A tool."""\n')
    (package / "zebra.py").write_text('"""Last of the model."""\n')
    return package


def test_packages_count_by_their_code_and_private_modules_do_not(package):
    assert [module.name for module in public_modules(package)] == [
        "pack.sub",
        "pack.sub.a",
        "pack.zebra",
        "pack.sitebuild.tool",
    ]
    assert public_modules(package)[1].summary == "First line."


def test_a_module_without_a_docstring_is_named(package):
    (package / "bare.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"bare.py has no docstring"):
        public_modules(package)
