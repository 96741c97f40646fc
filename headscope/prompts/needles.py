"""Needles: invented facts, each with a question, to hide in a haystack; built-in, or a user's as JSON lines.

The question of a literal needle uses its words, so a head can find it by matching tokens. The question of an indirect
needle shares no content word with it.
"""

import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from headscope.base import input_files, user_input
from headscope.errors import BadInput
from headscope.prompts.texts import refuse_copies

NeedleKind = Literal["literal", "indirect", "both"]

NEEDLE_TEMPLATES = (
    ("password", "What is the password of the archive in Quillhaven?", "The password of the archive in Quillhaven is"),
    ("emblem", "What is the emblem of the guild of Ulverdam?", "The emblem of the guild of Ulverdam is the"),
    ("gift", "What did Odette Marchbanks bring to Velmora?", "What Odette Marchbanks brought to Velmora was a"),
    (
        "sign",
        "What is painted on the door of the Corvane mill?",
        "What is painted on the door of the Corvane mill is a",
    ),
)
"""(group, question, opening of the fact) of the prompt pairs with a needle [ours]."""
FACT_WORDS = re.findall(
    r"\w+",
    "bridge candle circle crown dragon feather flower forest hammer horse lemon lion mirror moon mountain needle piano "
    "river rocket shadow shield spider tiger tower tree violin window wolf",
)
"""Words that end such facts, if the tokenizer writes them as one token."""


@dataclass(frozen=True)
class Needle:
    """`opening` and `fact` make the sentence that is hidden; `question` asks for the fact.

    An answer begins with the opening or, of an indirect needle, with the `cue`: words that are not the needle's.
    `real_needle` is the part of the needle that counts as the answer in Retrieval_Head; "" for the fact.
    """

    name: str
    question: str
    opening: str
    fact: str
    cue: str = ""
    real_needle: str = ""

    @property
    def text(self) -> str:
        return f"{self.opening} {self.fact}".strip()

    @property
    def is_indirect(self) -> bool:
        """Whether the question paraphrases the needle."""
        return bool(self.cue)


LITERAL_NEEDLES = (
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

INDIRECT_NEEDLES = (
    Needle(
        "bakery",
        "When can one first buy bread?",
        "The bakery on Linden Lane opens at",
        "5:40 in winter.",
        "One can buy bread from",
    ),
    Needle(
        "park",
        "Which animal was it?",
        "Behind the fence of the park stood a",
        "giraffe.",
        "The animal was a",
    ),
    Needle(
        "plate",
        "Which fruit was it?",
        "On the plate of the old woman lay a",
        "pineapple.",
        "The fruit was a",
    ),
    Needle(
        "safe",
        "Which code guards the money?",
        "The combination of the bank's safe is",
        "77 19 40.",
        "The code is",
    ),
    Needle(
        "sailors",
        "In which month do the men return?",
        "The sailors were told to come back in",
        "November.",
        "The month was",
    ),
    Needle(
        "violinist",
        "Where did the musician forget what keeps off the rain?",
        "The violinist left her umbrella in",
        "carriage 14 of the Dunmore express.",
        "The musician forgot it in",
    ),
)
"""Facts of the same kind whose questions share no word with them but small ones [ours]."""


def read_needles(file: str | None, count: int, kind: NeedleKind = "literal") -> list[Needle]:
    """The first `count` built-in needles of that kind (of each kind if both), or of the needles in `file`.

    The file has one JSON object per line with the fields of `Needle`; the cue and the real needle are optional. Lines
    of Retrieval_Head's own file, with the keys needle, question and real_needle, are accepted as published.

    Raises ResourceMissing if there is no such file, BadInput naming the line for anything else.
    """
    if file is None:
        sets = {
            "literal": [LITERAL_NEEDLES],
            "indirect": [INDIRECT_NEEDLES],
            "both": [LITERAL_NEEDLES, INDIRECT_NEEDLES],
        }[kind]
        if count > min(map(len, sets)):
            raise BadInput(
                f"{count} needles per kind exceed the {min(map(len, sets))} built-in ones. Use fewer, or your own "
                "with --file"
            )
        return [needle for needles in sets for needle in needles[:count]]
    lines = input_files.read_json_lines(file, "needle file")
    needles = [_parse_needle(value, location, number) for number, (location, value) in enumerate(lines, start=1)]
    if not needles:
        raise BadInput(f"'{file}' has no needle. Write one JSON object per line with {', '.join(_REQUIRED_FIELDS)}")
    refuse_copies(
        (location, (needle.question, needle.text, needle.cue))
        for (location, _), needle in zip(lines, needles, strict=True)
    )
    if repeated := {needle.name for needle in needles if [n.name for n in needles].count(needle.name) > 1}:
        raise BadInput(f"'{file}' has two needles named '{min(repeated)}'. Give each its own name")
    return needles[:count]


_OPTIONAL_FIELDS = ("cue", "real_needle")
_REQUIRED_FIELDS = [field.name for field in fields(Needle) if field.name not in _OPTIONAL_FIELDS]
_PUBLISHED_FIELDS = ("needle", "question", "real_needle")
"""Keys of the lines of Retrieval_Head's needles.jsonl."""


def _parse_needle(value: Any, location: str, number: int) -> Needle:
    is_published = isinstance(value, dict) and "needle" in value
    keys = (_PUBLISHED_FIELDS, ()) if is_published else (_REQUIRED_FIELDS, _OPTIONAL_FIELDS)
    input_files.check_keys(value, location, *keys)
    if is_published:
        value = _split_published_needle(value, location, number)
    patterns = dict.fromkeys(("name", "question", "opening"), (r"\S", "a string that is not empty"))
    patterns["fact"] = (r"\w", "a string that contains a word")
    if is_published:
        del patterns["opening"]  # the real needle may be the whole needle
    for key, text in value.items():
        pattern, expected = patterns.get(key, ("", "a string"))
        if not isinstance(text, str) or not re.search(pattern, text, re.DOTALL):
            raise BadInput(f"{location}: '{key}' is {user_input.quote(text)}. Write {expected}")
        try:
            user_input.check_text(text)
        except ValueError as error:
            raise BadInput(f"{location}: {error}") from error
    needle = Needle(**value)
    if needle.real_needle.lower() not in needle.text.lower():
        raise BadInput(
            f"{location}: 'real_needle' is {user_input.quote(needle.real_needle)}, which is no part of opening and "
            "fact. Copy it from there"
        )
    return needle


def _split_published_needle(value: dict[str, Any], location: str, number: int) -> dict[str, Any]:
    """The fields of `Needle` for a line of Retrieval_Head: the fact begins with the real needle, in any case.

    The name is its number in the file.
    """
    needle, real_needle = value["needle"], value["real_needle"]
    start = needle.lower().find(real_needle.lower()) if isinstance(needle, str) and isinstance(real_needle, str) else -1
    if start < 0 or not real_needle:
        raise BadInput(
            f"{location}: 'real_needle' is {user_input.quote(real_needle)}, which is no part of 'needle'. Copy it from "
            "there"
        )
    parts = {"opening": needle[:start].strip(), "fact": needle[start:].strip(), "real_needle": real_needle}
    return {"name": f"needle {number}", "question": value["question"], **parts}
