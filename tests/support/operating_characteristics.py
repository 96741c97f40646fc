"""How often each verdict is given where the truth is known: the tables of docs/operating-characteristics.md.

`python -m tests.support.operating_characteristics FOLDER [SIMULATION...]` simulates them and rewrites the page. The
counts of each world and size are kept in the folder: an interrupted simulation goes on. Begin with an empty one.
"""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import numpy as np

from headscope.results.result import Result

from .simulated_claims import SIMULATIONS, WORLDS, World, is_false_verdict, truth

PAGE = Path(__file__).parents[2] / "docs" / "operating-characteristics.md"
SIZES = (4, 8, 16, 40)
TABLES = 100
"""Simulated tables of each world and size."""
MAX_FALSE = 5
"""Largest number of false verdicts in `TABLES` tables."""
CLAIMS: Mapping[str, str] = {
    "influence.heavy_tail": "a few KV groups account for most of the influence",
    "influence.tail_head": "the top retrieval head is among the 5 % with the largest influence",
    "influence.small_parts": "the largest effect of one group is below a quarter of that of all",
    "answer_influence.largest_head": "the top retrieval head has the largest influence on answers",
    "retrieval.ablation_claim": "top heads matter more than random heads",
    "adapt.claim.loss": "lower loss than YaRN at each of 40 positions",
    "adapt.claim.slow_pairs": "frequencies change mostly in the slow pairs",
    "adapt.claim.depth": "early layers move down, late layers up",
    "adapt.claim.tau": "the median tau is near 1",
    "adapt.claim.gamma": "gamma is mostly positive",
    "adapt.claim.lengths_without_factor": "YaRN without factor lengthens all heads",
    "adapt.claim.lengths_yarn": "YaRN lengthens no heads",
    "adapt.claim.lengths_adarope": "AdaRoPE lengthens large-ESS heads only",
    "adapt.claim.evenness": "AdaRoPE uses the pairs more evenly than YaRN",
    "adapt.claim.base_by_depth": "the effective base grows with depth",
    "pretrain.claim.cov": "AdaRoPE uses the pairs more evenly",
    "pretrain.claim.effective_base": "the effective base grows with depth, by seed",
    "pretrain.claim.gamma": "gamma is largest in the first layer, small in the others",
    "pretrain.claim.lengths": "wider range of effective lengths, gamma falls with them",
    "pretrain.claim.used_frequencies": "used frequencies are wider spread and follow the learned ones",
    "pretrain.claim.ablations": "ablations of AdaRoPE have a higher loss",
    "pretrain.claim.schemes": "every other scheme has a higher loss",
}
"""The claims in brief, by question."""
Counts = dict[tuple[str, World], Counter[str]]
"""Verdicts by claim and truth, and "false" for those that contradict it."""


def count_verdicts(simulation: str, n: int, tables: Iterable[int], worlds: Iterable[World] = WORLDS) -> Counts:
    """The verdicts of every claim of a simulation in these tables of each world."""
    counts: Counts = defaultdict(Counter)
    for world in worlds:
        for table in tables:
            seed = [WORLDS.index(world), n, table]
            claims: Iterable[Result] = SIMULATIONS[simulation](world, np.random.default_rng(seed), n)
            for claim in claims:
                counts[claim.question, truth(claim, world)] += Counter(
                    {claim.verdict: 1, "false": int(is_false_verdict(claim, world)), "all": 1}
                )
    return counts


def counts_in(folder: Path, simulation: str, n: int) -> Counts:
    """The verdicts in `TABLES` tables of each world, counted now unless the folder has them."""
    counts: Counts = defaultdict(Counter)
    for world in WORLDS:
        file = folder / f"{simulation}-{world}-{n}.json"
        if not file.exists():
            of_world = count_verdicts(simulation, n, range(TABLES), [world])
            file.write_text(json.dumps({"|".join(key): count for key, count in of_world.items()}), encoding="utf-8")
        for key, count in json.loads(file.read_text(encoding="utf-8")).items():
            question, known = key.split("|")
            counts[question, cast(World, known)] += Counter(count)
    return counts


def rows(by_size: Mapping[int, Counts]) -> list[str]:
    """The rows of one simulation: supported and not supported in 100 tables, by n."""
    return [
        f"| {CLAIMS[question]} | {world} | " + " | ".join(_cell(by_size[n][question, world]) for n in SIZES) + " |"
        for question, world in by_size[SIZES[0]]
    ]


def _cell(counts: Counter[str]) -> str:
    supported, refuted = (100 * counts[name] / counts["all"] for name in ("supported", "not supported"))
    return f"{supported:.0f}, {refuted:.0f}"


def rewrite_section(simulation: str, by_size: Mapping[int, Counts], tables: int) -> None:
    """Replace the number of tables and the rows of a simulation, which follow its marker on the page."""
    pattern = rf"(<!-- {simulation} -->\n)\d+( simulated tables of each world and n:\n\n\|.*\n\|[-|]+\n)(?:\|.*\n)*"
    new = rf"\g<1>{tables}\g<2>" + "".join(f"{row}\n" for row in rows(by_size))
    text, count = re.subn(pattern, new, PAGE.read_text(encoding="utf-8"))
    assert count == 1, simulation
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    for name in sys.argv[2:] or SIMULATIONS:
        rewrite_section(name, {n: counts_in(Path(sys.argv[1]), name, n) for n in SIZES}, TABLES)
