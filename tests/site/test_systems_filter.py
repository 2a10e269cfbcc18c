"""The table of systems can be filtered with a keyboard, and the address holds the view."""

import pytest
from site_project import ROOT

from guide_code.sitebuild.systems import SYSTEMS, systems_table


@pytest.mark.browser
def test_words_and_columns_filter_the_table_and_stand_in_the_address(browser, tmp_path):
    script = (ROOT / "docs/assets/javascripts/systems.js").read_text(encoding="utf-8")
    path = tmp_path / "tool.html"
    path.write_text(f'<meta charset="utf-8">{systems_table(ROOT / SYSTEMS)}<script>{script}</script>', encoding="utf-8")
    page = browser.new_page()
    try:
        page.goto(path.as_uri())
        page.get_by_role("searchbox").press_sequentially("triton 2403")
        assert page.get_by_role("status").inner_text().startswith("0 of ")
        page.get_by_role("searchbox").fill("triton")
        shown = page.locator("tbody tr:visible")
        assert shown.count() == page.locator("tbody tr", has_text="Triton").count() > 0
        box = page.get_by_role("checkbox", name="Licence")
        box.focus()
        page.keyboard.press("Space")
        assert not page.locator('th[data-column="licence"]').is_visible()
        address = page.url
        page.goto("about:blank")
        page.goto(address)
        assert page.get_by_role("searchbox").input_value() == "triton"
        assert not page.get_by_role("checkbox", name="Licence").is_checked()
        assert page.locator("tbody tr:visible").count() == page.locator("tbody tr", has_text="Triton").count()
    finally:
        page.close()
