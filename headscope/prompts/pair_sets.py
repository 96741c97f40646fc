"""Sets of prompt pairs: generated with a seed, or read from a file. Pairs are built on access, one at a time.

- ioi: indirect object identification (Wang et al. 2022), with our own templates and names, both name orders and three
  corruptions: another repeated name ("other"), the names exchanged ("swap"), or three unrelated names ("all").
- ioi:other, ioi:swap, ioi:abc: the same with one of these corruptions only; abc has three unrelated names.
- greater-than: a later year of the same century (Hanna et al. 2023); corrupted: the first decade of the century, after
  which both answers are later years.
- induction: random tokens, repeated; corrupted: another token after the earlier copy.
- needle: a hidden fact in a long text, queried at its end; corrupted: another fact in the same text.

Names, words and numbers are chosen among those that the tokenizer writes as one token. No pair of a set repeats
another. Named spans: `last` in every set; indirect-object, subject and second-subject (ioi); decade (greater-than);
earlier-copy and successor, both before the repetition (induction); needle, answer and question (needle).
"""

import hashlib
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from headscope.errors import BadInput, did_you_mean
from headscope.prompts.haystack import Haystack, NeedlePromptBuilder, tokenize_plain
from headscope.prompts.needles import FACT_WORDS, NEEDLE_TEMPLATES, Needle
from headscope.prompts.pairs import (
    METRICS_OF_ONE_TOKEN,
    METRICS_WITH_WRONG,
    PAIR_OPTIONS,
    Alignment,
    PromptPair,
    TokenPair,
    continuation_tokens,
    read_prompt_pairs,
    refuse_unread_answers,
    tokenize_pair,
)
from headscope.prompts.special_tokens import chat_text, leading_special_tokens, warn_about_repeated_bos

log = logging.getLogger("headscope")
SetName = Literal["ioi", "greater-than", "induction", "needle", "ioi:other", "ioi:swap", "ioi:abc"]
GENERATED_SETS: tuple[SetName, ...] = get_args(SetName)
SETS_OF_ANY_LENGTH: tuple[SetName, ...] = ("induction", "needle")
"""Sets whose prompts have as many tokens as requested."""
PROMPT_SET = "prompt"
"""Name of the set of a single prompt (`single_pair_set`)."""
MAX_REPEATED_DRAWS = 1000
"""Draws in a row that repeat an earlier pair before a set counts as exhausted."""


@dataclass(frozen=True, eq=False)
class PairSet:
    """Prompt pairs in the tokens of one model. `build(n)` builds pair n, whose name is `pair_names[n]`.

    `digest` identifies the content, for resumed runs. `length` is the number of tokens of the longest prompt, and
    `clean_lengths` are those of the shortest and the longest clean prompt.
    """

    name: str
    pair_names: Sequence[str]
    build: Callable[[int], TokenPair]
    digest: str
    length: int
    clean_lengths: tuple[int, int]

    def __len__(self) -> int:
        return len(self.pair_names)


def file_pairs(
    file: str,
    tokenizer: Any,
    alignment: Alignment,
    *,
    needs_one_token: bool,
    needs_wrong: bool,
    options: Collection[str] = PAIR_OPTIONS,
) -> PairSet:
    """The pairs of a file; every pair is checked at once. Raises as `read_prompt_pairs` and `tokenize_pair` do."""
    pairs = read_prompt_pairs(file, needs_corrupted=alignment != "unused")
    corrupted_answers = [pair.corrupted_answer for pair in pairs]
    content = repr(pairs) + (repr(corrupted_answers) if any(corrupted_answers) else "")
    if alignment == "unused":
        pairs = [replace(pair, corrupted=pair.clean, corrupted_answer="") for pair in pairs]
    needs = {"needs_one_token": needs_one_token, "needs_wrong": needs_wrong}

    def build(index: int) -> TokenPair:
        return tokenize_pair(tokenizer, pairs[index], alignment, options=options, **needs)

    tokens = [build(index) for index in range(len(pairs))]
    prompts = [ids.tolist() for pair in tokens for ids in (pair.clean, pair.corrupted)]
    warn_about_repeated_bos(tokenizer, prompts, f"prompts of '{file}'")
    _warn_about_leading_spaces(pairs, f"prompt pairs of '{file}'")
    digest = hashlib.sha256(content.encode()).hexdigest()
    clean = [len(pair.clean) for pair in tokens]
    names = [pair.name for pair in pairs]
    return PairSet(_file_set_name(file), names, build, digest, max(map(len, prompts)), (min(clean), max(clean)))


def single_pair_set(
    tokenizer: Any,
    prompt: str,
    answer: str,
    wrong: str,
    *,
    template: bool,
    needs_one_token: bool,
    needs_wrong: bool,
    options: Collection[str] = PAIR_OPTIONS,
) -> PairSet:
    """A prompt and its answers as a set of one pair, without a corrupted prompt; raises as `tokenize_pair` does.

    `template`: the prompt is put into the chat template of the tokenizer.
    """
    if template:
        prompt = chat_text(tokenizer, prompt, "Leave out the template")
    pair = PromptPair(PROMPT_SET, prompt, prompt, answer, wrong, has_template=template)
    needs = {"needs_one_token": needs_one_token, "needs_wrong": needs_wrong}
    tokens = tokenize_pair(tokenizer, pair, "unused", options=options, **needs)
    _warn_about_leading_spaces([pair], "prompts")
    if not template:
        warn_about_repeated_bos(tokenizer, [tokens.clean.tolist()], "prompts")
    length = len(tokens.clean)
    return PairSet(PROMPT_SET, [PROMPT_SET], lambda index: tokens, repr(pair), length, (length, length))


def _warn_about_leading_spaces(pairs: Sequence[PromptPair], noun: str) -> None:
    """Warn in one line if only one of answer and wrong answer begins with a space; `noun` names the pairs."""
    differing = [pair for pair in pairs if pair.wrong and pair.answer[:1].isspace() != pair.wrong[:1].isspace()]
    if differing:
        log.warning(
            "%d of %d %s have only one answer with a leading space: %r and %r. Begin both answers alike",
            *(len(differing), len(pairs), noun, differing[0].answer, differing[0].wrong),
        )


def _file_set_name(file: str) -> str:
    """The name of the set of a file: its stem, after "file:" if the stem is the name of another set."""
    stem = re.split(r"[/\\]", file)[-1].removesuffix(".jsonl")
    return f"file:{stem}" if stem in (*GENERATED_SETS, PROMPT_SET) else stem


def check_source(source: str) -> str:
    """The source of a set. Raises ValueError for a misspelt name of a generated set."""
    is_bare_name = source not in GENERATED_SETS and "." not in source and "/" not in source
    if is_bare_name and (hint := did_you_mean(source, GENERATED_SETS)):
        raise ValueError(f"no set of prompt pairs '{source}'{hint}. A file of that name is ./{source}")
    return source


def check_set_names(pair_sets: Sequence[PairSet]) -> None:
    """Raise BadInput for two sets of one name, which stored tables could not tell from each other."""
    names = [pairs.name for pairs in pair_sets]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise BadInput(f"two sets of prompt pairs are named '{repeated[0]}'. Name each set once, or rename the file")


def load_pair_set(
    source: str,
    tokenizer: Any,
    load_haystacks: Callable[[], Sequence[Haystack]],
    *,
    count: int,
    length: int,
    seed: int,
    alignment: Alignment,
    metric: str,
    options: Collection[str] = PAIR_OPTIONS,
) -> PairSet:
    """A generated set by its name, or the pairs of a file, with the answers that the metric needs.

    `load_haystacks` is called for the set needle only. `options`: as in `tokenize_pair`.
    """
    if source in GENERATED_SETS:
        haystacks = load_haystacks() if source == "needle" else []
        return generated_pairs(source, tokenizer, count, length, seed, haystacks)
    if alignment in ("equal", "end"):
        refuse_unread_answers(source, metric, options)
    return file_pairs(
        source,
        tokenizer,
        alignment,
        needs_one_token=metric in METRICS_OF_ONE_TOKEN,
        needs_wrong=metric in METRICS_WITH_WRONG,
        options=options,
    )


def generated_pairs(
    name: SetName, tokenizer: Any, count: int, length: int, seed: int, haystacks: Sequence[Haystack] = ()
) -> PairSet:
    """`count` pairs of a generated set. `length` is the number of tokens of an induction or needle prompt.

    `haystacks` are the texts of needle prompts, each at least `length` tokens long. Raises BadInput if the tokenizer
    writes too few of the set's words as one token, if `length` is too short, or if there are fewer than `count`
    different pairs.
    """
    if name == "induction":
        builder = _induction_builder(tokenizer, length)
    elif name == "needle":
        builder = _needle_builder(tokenizer, length, haystacks)
    else:
        builder = _greater_than_builder(tokenizer) if name == "greater-than" else _ioi_builder(tokenizer, name)
    number = GENERATED_SETS.index(name)

    def draw(index: int, attempt: int) -> TokenPair:
        return builder(f"{name} {index}", np.random.default_rng([seed, number, attempt]))

    attempts: list[int] = []  # those that gave a new pair
    contents: set[bytes] = set()
    attempt = longest = 0
    clean: set[int] = set()
    while len(attempts) < count:
        pair = draw(len(attempts), attempt)
        content = _digest(pair)
        if content not in contents:
            contents.add(content)
            attempts.append(attempt)
            longest = max(longest, len(pair.clean), len(pair.corrupted))
            clean.add(len(pair.clean))
        elif attempt - attempts[-1] > MAX_REPEATED_DRAWS:
            raise BadInput(
                f"the set {name} has too few different pairs for a count of {count}: {len(attempts)} were found. Use "
                f"--count {len(attempts)} or fewer"
            )
        attempt += 1

    def build(index: int) -> TokenPair:
        return draw(index, attempts[index])

    names, digest = [f"{name} {index}" for index in range(count)], f"{name} {count} {length} {seed}"
    return PairSet(name, names, build, digest, longest, (min(clean), max(clean)))


def _digest(pair: TokenPair) -> bytes:
    """Identifies the content of a pair."""
    ids = (pair.clean, pair.corrupted, pair.answer, pair.wrong)
    return hashlib.sha256(b"|".join(part.astype(np.int32).tobytes() for part in ids)).digest()


Builder = Callable[[str, np.random.Generator], TokenPair]
"""(name, random generator) -> a pair."""

# Indirect object identification ------------------------------------------------------------------------------------

NAMES = re.findall(
    r"\w+",
    "Anna Ben Carl Clara David Emma Frank George Grace Henry Jack James Jane John Kate Laura Lisa Mark Martin Mary "
    "Michael Paul Peter Robert Rose Sam Sarah Simon Thomas Tom Victor William Alice Adam Eric Helen Kevin Linda Oliver "
    "Rachel",
)
PLACES = re.findall(r"\w+", "market station library garden harbor museum office school theater village")
OBJECTS = re.findall(r"\w+", "book letter ring map coin lamp key ticket basket cup")
IOI_TEMPLATES = (
    "When {first} and {second} walked to the {place}, {giver} handed a {object} to",
    "After {first} and {second} had met at the {place}, {giver} gave a {object} to",
    "Yesterday {first} and {second} were in the {place}, and {giver} sent a {object} to",
    "While {first} and {second} waited at the {place}, {giver} passed a {object} to",
)
"""Sentences with a repeated subject, which end before the indirect object [ours]."""
CORRUPTIONS: Mapping[str, tuple[str, ...]] = {
    "ioi": ("other", "swap", "all"),
    "ioi:other": ("other",),
    "ioi:swap": ("swap",),
    "ioi:abc": ("all",),
}
"""Corruptions of each set."""


def _ioi_builder(tokenizer: Any, name: SetName) -> Builder:
    corruptions = CORRUPTIONS[name]
    names, places, objects = (
        one_token_words(tokenizer, words, needed=needed) for words, needed in ((NAMES, 6), (PLACES, 1), (OBJECTS, 1))
    )

    def build(name: str, rng: np.random.Generator) -> TokenPair:
        recipient, giver, *others = rng.permutation(names)[:6]
        is_abba = bool(rng.integers(2))  # the subject comes second and is repeated
        corruption = corruptions[rng.integers(len(corruptions))]
        template = IOI_TEMPLATES[rng.integers(len(IOI_TEMPLATES))]
        words = {"place": rng.choice(places), "object": rng.choice(objects)}

        def prompt(recipient: str, giver: str, repeated: str) -> str:
            first, second = (recipient, giver) if is_abba else (giver, recipient)
            return template.format(first=first, second=second, giver=repeated, **words)

        corrupted = {
            "other": prompt(recipient, giver, others[0]),
            "swap": prompt(recipient, giver, recipient),
            "all": prompt(others[0], others[1], others[2]),
        }[corruption]
        clean, group = prompt(recipient, giver, giver), f"{'ABBA' if is_abba else 'BABA'} {corruption}"
        pair = PromptPair(name, clean, corrupted, f" {recipient}", f" {giver}", group, is_contrast=corruption == "swap")
        tokens = tokenize_pair(tokenizer, pair, needs_one_token=True, needs_wrong=True)
        (recipient_at,), (subject_at, repeated_at) = (
            np.flatnonzero(tokens.clean == answer) for answer in (tokens.answer, tokens.wrong)
        )
        return _with_spans(
            tokens, {"indirect-object": recipient_at, "subject": subject_at, "second-subject": repeated_at}
        )

    return build


# Greater than ------------------------------------------------------------------------------------------------------

EVENTS = re.findall(r"\w+", "war siege strike expedition drought treaty voyage dispute reign project")
CENTURIES = (12, 13, 14, 15, 16, 17, 18)


def _greater_than_builder(tokenizer: Any) -> Builder:
    """Years are compared by their decade digit where the tokenizer splits numbers into digits."""
    events = one_token_words(tokenizer, EVENTS, needed=1)
    has_two_digits = all(
        _is_one_token(tokenizer, f"the year {century}", f"{year:02d}") for century in CENTURIES for year in range(100)
    )

    def build(name: str, rng: np.random.Generator) -> TokenPair:
        century, decade, year_digit = rng.choice(CENTURIES), int(rng.integers(3, 8)), int(rng.integers(2, 9))
        later, earlier = int(rng.integers(decade + 1, 10)), int(rng.integers(1, decade))
        text = f"The {rng.choice(events)} lasted from the year {century}{{}}{year_digit} to the year {century}"
        ending = str(year_digit) if has_two_digits else ""
        prompts = text.format(decade), text.format(0)
        answers = f"{later}{ending}", f"{earlier}{ending}"
        pair = PromptPair(name, *prompts, *answers, str(century), is_contrast=False)
        tokens = tokenize_pair(tokenizer, pair, needs_one_token=True, needs_wrong=True)
        return _with_spans(tokens, {"decade": np.flatnonzero(tokens.clean != tokens.corrupted)[0]})

    return build


# Induction ---------------------------------------------------------------------------------------------------------


def _induction_builder(tokenizer: Any, length: int) -> Builder:
    """Prompts of `length` tokens: random words, then the same words up to the one whose successor is the answer."""
    leading = np.array(leading_special_tokens("a", tokenizer), np.int32)
    words = _word_tokens(tokenizer)
    word_count = length - len(leading)
    if word_count < 4:
        raise BadInput(f"a length of {length} is too short for induction. Use at least {len(leading) + 4} tokens")
    if len(words) <= word_count:
        raise BadInput(
            f"the tokenizer has {len(words)} words of one token, too few for induction prompts of {length} tokens. "
            "Use a shorter --length"
        )

    def build(name: str, rng: np.random.Generator) -> TokenPair:
        repeat_count = int(rng.integers(max(1, word_count // 4), word_count // 2))
        sequence = rng.choice(words, word_count - repeat_count, replace=False)
        wrong = rng.choice(np.setdiff1d(words, sequence))
        clean = np.concatenate([leading, sequence, sequence[:repeat_count]]).astype(np.int32)
        corrupted, successor = clean.copy(), len(leading) + repeat_count
        corrupted[successor] = wrong
        answer_ids, wrong_ids = (np.array([token], np.int32) for token in (sequence[repeat_count], wrong))
        pair = TokenPair(name, "", clean, corrupted, answer_ids, wrong_ids, length)
        return _with_spans(pair, {"earlier-copy": successor - 1, "successor": successor})

    return build


def _word_tokens(tokenizer: Any) -> np.ndarray:
    """The tokens that stand for one word of letters and digits, possibly after a space."""
    special = set(tokenizer.all_special_ids)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))], clean_up_tokenization_spaces=False)
    is_word = re.compile(r" ?[^\W_]{2,}")
    return np.array([n for n, text in enumerate(texts) if n not in special and is_word.fullmatch(text)], np.int32)


# Needle ------------------------------------------------------------------------------------------------------------


def _needle_builder(tokenizer: Any, length: int, haystacks: Sequence[Haystack]) -> Builder:
    words = one_token_words(tokenizer, FACT_WORDS, needed=2)

    def build(name: str, rng: np.random.Generator) -> TokenPair:
        group, question, opening = NEEDLE_TEMPLATES[rng.integers(len(NEEDLE_TEMPLATES))]
        answer, wrong = rng.choice(words, 2, replace=False)
        haystack, depth = haystacks[int(rng.integers(len(haystacks)))], float(rng.uniform(0.05, 0.95))
        builders = [
            NeedlePromptBuilder(Needle(group, question, opening, f"{word}."), tokenizer, "prefix")
            for word in (answer, wrong)
        ]
        prompts = [builder.prompt_with_needle(haystack, length, depth) for builder in builders]
        clean, corrupted = (prompt.ids.astype(np.int32) for prompt in prompts)
        answer_ids, wrong_ids = (tokenize_plain(tokenizer, f"{opening} {word}")[-1:] for word in (answer, wrong))
        pair = TokenPair(name, group, clean, corrupted, answer_ids, wrong_ids, length)
        spans = {"needle": range(prompts[0].end - len(builders[0].needle_ids), prompts[0].end)}
        spans["question"] = range(length - len(builders[0].suffix_ids), length)
        return _with_spans(pair, {"answer": np.flatnonzero(clean != corrupted)[0], **spans})

    return build


# Words of one token ------------------------------------------------------------------------------------------------


def one_token_words(tokenizer: Any, words: Sequence[str], needed: int) -> list[str]:
    """The words that are one token after a space. Raises BadInput if they are fewer than `needed`."""
    usable = [word for word in words if _is_one_token(tokenizer, "so the", f" {word}")]
    if len(usable) < needed:
        raise BadInput(
            f"the tokenizer writes only {len(usable)} of {len(words)} built-in words ({words[0]}, {words[1]}, ...) as "
            f"one token, and {needed} are needed. Use a file of prompt pairs"
        )
    return usable


def _with_spans(pair: TokenPair, spans: Mapping[str, Any]) -> TokenPair:
    """The pair with named spans: ranges, or the position of a single token."""
    ranges = {name: at if isinstance(at, range) else range(int(at), int(at) + 1) for name, at in spans.items()}
    return replace(pair, spans=ranges)


def _is_one_token(tokenizer: Any, text: str, continuation: str) -> bool:
    """Whether `continuation` after `text` is one token that is not a special token."""
    ids = continuation_tokens(tokenizer, text, continuation)
    return ids is not None and len(ids) == 1 and int(ids[0]) not in tokenizer.all_special_ids
