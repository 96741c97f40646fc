"""Simulated claims: at most 5 of 100 verdicts are false, in the page's tables and in a few tables simulated here."""

import re

import pytest
from scipy import stats
from support.operating_characteristics import CLAIMS, MAX_FALSE, PAGE, count_verdicts
from support.simulated_claims import SIMULATIONS

TABLES = 6
"""Simulated tables of each world, few because the page has many."""


@pytest.mark.slow
@pytest.mark.parametrize("simulation", SIMULATIONS)
def test_few_verdicts_are_false(simulation: str) -> None:
    """Four of six false verdicts have a chance below one in ten thousand at 5 %."""
    n = 20 if simulation == "adapter" else 8  # the share of the slow pairs needs 60 KV groups in three layers
    for (question, world), counts in count_verdicts(simulation, n, range(TABLES)).items():
        assert stats.binom.sf(counts["false"] - 1, counts["all"], MAX_FALSE / 100) > 1e-4, (question, world, counts)


def test_many_tables_decide_a_large_effect() -> None:
    counts = count_verdicts("influence", 40, range(2))
    for question in ("influence.tail_head", "influence.small_parts", "answer_influence.largest_head"):
        assert counts[question, "true"]["supported"] == 2
    assert counts["influence.heavy_tail", "true"]["supported"] == counts["influence.heavy_tail", "false"]["false"] + 2


def test_the_page_has_every_claim_and_few_false_verdicts() -> None:
    """A quantity on its threshold has 5 % false verdicts by definition of the interval, and more by chance."""
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    names = set()
    for section in sections:
        tables = int(re.search(r"^(\d+) simulated tables", section, re.MULTILINE)[1])  # type: ignore[index]
        for name, world, cells in re.findall(
            r"^\| (.+?) \| (true|false|undecidable) \| (.+) \|$", section, re.MULTILINE
        ):
            names.add(name)
            for cell in cells.split(" | "):
                supported, refuted = map(int, cell.split(", "))
                wrong = {"true": refuted, "false": supported, "undecidable": supported + refuted}[world]
                count = round(wrong * tables / 100)
                assert stats.binom.sf(count - 1, tables, MAX_FALSE / 100) > 1e-3, (name, world, cell)
    assert names == {*CLAIMS.values()}
