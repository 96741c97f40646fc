"""Needles: invented facts, each with a question, to hide in a haystack. Ours, or a user's as JSON lines."""

import json
import re
from dataclasses import dataclass, fields

from headscope import given
from headscope.errors import BadInput, Missing


@dataclass(frozen=True)
class Needle:
    """`opening` and `fact` make the sentence that is hidden; `question` asks for the fact."""

    name: str
    question: str
    opening: str
    fact: str

    @property
    def text(self) -> str:
        return f"{self.opening} {self.fact}".strip()


OURS = (
    Needle(
        "bell",
        "When was the harbour bell of Port Selwyn cast, and by whom?",
        "The harbour bell of Port Selwyn was cast in the year",
        "1847 by Odette Marchbanks of Tarn Street.",
    ),
    Needle(
        "ledger",
        "How much does the ledger of the Corvane mill record?",
        "The ledger of the Corvane mill records a total of",
        "312 sacks of rye and 58 barrels of tar.",
    ),
    Needle(
        "telescope",
        "Where is the key of the Brenholm telescope hidden?",
        "The key of the Brenholm telescope is hidden under",
        "step 26 of the copper staircase in Ulverdam.",
    ),
    Needle(
        "train",
        "When does the night train to Velmora leave, and from which platform?",
        "The night train to Velmora leaves at",
        "4:17 from platform 93 behind the customs shed.",
    ),
    Needle(
        "password",
        "What is the password of the archive in Quillhaven?",
        "The password of the archive in Quillhaven is",
        "marzipan 7726 walrus lantern.",
    ),
    Needle(
        "telephone",
        "What is the telephone number of Ingrid Solheim?",
        "The telephone number of Ingrid Solheim is",
        "55 28 714 63 09.",
    ),
)
"""Facts with names and digits that no haystack states, in words that a small model continues [ours]."""


def read_needles(file: str | None, count: int) -> list[Needle]:
    """The first `count` of our needles, or of those in `file`: one JSON object a line with the fields of `Needle`.

    Raises Missing if there is no such file, BadInput naming the line for anything else.
    """
    if file is None:
        needles = list(OURS)
    else:
        try:
            lines = given.path(file, "needle file").read_text(encoding="utf-8").split("\n")
        except FileNotFoundError as error:
            raise Missing(f"no needles at '{file}': check the path") from error
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"cannot read needles from '{file}': {error}") from error
        needles = [_parsed(line, f"'{file}', line {at}") for at, line in enumerate(lines, start=1) if line.strip()]
        if not needles:
            raise BadInput(f"'{file}' holds no needle; write one JSON object a line with {', '.join(_FIELDS)}")
    if repeated := {needle.name for needle in needles if [n.name for n in needles].count(needle.name) > 1}:
        raise BadInput(f"'{file}' names two needles '{min(repeated)}'; give each its own name")
    return needles[:count]


_FIELDS = [field.name for field in fields(Needle)]


def _parsed(line: str, where: str) -> Needle:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where} is not JSON ({error})") from error
    if not isinstance(value, dict) or set(value) != set(_FIELDS):
        raise BadInput(f"{where} needs exactly the keys {', '.join(_FIELDS)}")
    if (
        not all(isinstance(text, str) for text in value.values())
        or not value["name"]
        or not re.search(r"\w", value["fact"])
    ):
        raise BadInput(f"{where}: the values are texts; the name must not be empty, and the fact needs words")
    try:
        for text in value.values():
            given.text(text)
    except ValueError as error:
        raise BadInput(f"{where}: {error}") from error
    return Needle(**value)
