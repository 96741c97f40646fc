"""The wording of results, in one page per renderer, so that a change of wording is one difference to read."""

import pytest
from golden_pages import FOLDER, PAGES


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_wording_is_that_of_the_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    page = (FOLDER / name).read_text(encoding="utf-8")
    assert PAGES[name]() == page, "run `python -m tests.golden_pages` and read the difference"
