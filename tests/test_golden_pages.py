"""The wording of results, in one page per renderer, so that a change of wording is one difference to read."""

import re

import pytest
from golden_pages import FOLDER, PAGES, shipped_runs

from headscope.results import words
from headscope.results.collection import all_results

ONE_OF_MANY = re.compile(
    r"(?<![\d.,])1 (documents|heads|KV groups|layers|models|pairs|prompts|runs|seeds|steps|texts|tokens|trials)\b"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_wording_is_that_of_the_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    page = (FOLDER / name).read_text(encoding="utf-8")
    assert PAGES[name]() == page, "run `python -m tests.golden_pages` and read the difference"


@pytest.mark.slow
def test_one_thing_is_not_called_by_its_plural() -> None:
    texts = {
        text
        for run in shipped_runs()
        for result in all_results(run)
        for text in (words.sentence(result), words.headline(result))
    }
    assert [text for text in texts if ONE_OF_MANY.search(text)] == []
