"""Prompt pairs: a clean prompt, a corrupted prompt, and the answers whose logits a causal study compares.

A pair is read from a JSON lines file or generated (`pair_sets`), and then written in the tokens of one model. Both
prompts need the same number of tokens, because an activation at a position of one run replaces the activation at the
same position of the other run.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from headscope.base import input_files, user_input
from headscope.errors import BadInput, did_you_mean
from headscope.prompts.haystack import Ids, decode_tokens, tokenize_plain
from headscope.prompts.special_tokens import leading_special_tokens
from headscope.prompts.texts import refuse_copies
from headscope.prompts.token_positions import LAST_SPAN, parse_positions, resolve_positions
from headscope.prompts.token_text import token_offsets

_METRICS = {
    "logit_diff": ("logit difference", "logits"),
    "prob_diff": ("probability difference", "probability"),
    "logprob": ("log-probability of the answer", "nats"),
    "rank": ("rank of the answer", "tokens"),
    "kl": ("KL divergence from the clean run", "nats"),
    "nll": ("loss of the answer", "nats/token"),
}
"""Labels and units of the metrics of an answer (`headscope.interventions.metrics`)."""
METRICS_WITH_WRONG = ("logit_diff", "prob_diff")
"""Metrics that compare the answer with the wrong answer."""
METRICS_OF_ONE_TOKEN = (*METRICS_WITH_WRONG, "logprob", "rank")
"""Metrics of answers of one token."""
METRICS_OF_LAST_TOKEN = (*METRICS_OF_ONE_TOKEN, "kl")
"""Metrics that read the prediction at the last token of the prompt only."""
OWN_METRIC = "own:"
"""What the stored name of a metric begins with that is a function of the user."""


def stored_metric_name(metric: Any) -> str:
    """The name of a metric as a run stores it; "own:NAME" for a function."""
    return metric if isinstance(metric, str) else f"{OWN_METRIC}{getattr(metric, '__name__', type(metric).__name__)}"


def metric_label(metric: str) -> str:
    """The description of a metric in the text of a report; "metric NAME" for a function."""
    return f"metric {metric.removeprefix(OWN_METRIC)}" if metric.startswith(OWN_METRIC) else _METRICS[metric][0]


def metric_unit(metric: str) -> str:
    """The unit of a metric."""
    return "its unit" if metric.startswith(OWN_METRIC) else _METRICS[metric][1]


Alignment = Literal["equal", "end", "free", "unused"]
"""equal: both prompts have the same number of tokens; end: only their common last tokens correspond; free: no tokens
need to correspond, for probes that patch nothing; unused: for probes that do not read the corrupted prompt."""

RESERVED_SPAN_NAMES = ("all", "each")
"""Names of positions that are not spans of a pair."""
PAIR_OPTIONS = ("align", "metric")
"""Options that decide which pairs a probe can use. A probe may lack them."""


@dataclass(frozen=True)
class PromptPair:
    """Two prompts as text. `answer` continues `clean`, and `wrong` is the answer that it is compared with.

    Both answers begin with their space, if they have one. `group` names a kind of pair within its set. `spans` names
    parts of the clean prompt: a text that occurs in it once, or its first token and the one after its last.
    `corrupted_answer` follows the corrupted prompt in place of the answer, which is still the one that is scored: a
    text with another continuation. `location` is where the pair comes from, for messages.
    """

    name: str
    clean: str
    corrupted: str
    answer: str
    wrong: str = ""
    group: str = ""
    spans: Mapping[str, str | tuple[int, int]] = field(default_factory=dict)
    corrupted_answer: str = field(default="", repr=False)  # files without it keep the digest of earlier versions
    location: str = field(default="", compare=False)
    has_template: bool = False
    """Whether the prompts hold their special tokens, from a chat template: the tokenizer adds none."""
    is_contrast: bool = True
    """Whether the wrong answer is the right one of the corrupted prompt, as in a file of pairs. If not, the corrupted
    prompt only lacks what the answer follows from."""


@dataclass(frozen=True, eq=False)
class TokenPair:
    """A prompt pair in the tokens of one model: `clean` [L] and `corrupted` [L'], the answer [n], the wrong answer [m].

    `aligned` is the number of last prompt tokens that correspond: L, or with the alignment "end" the length of the
    common suffix. `spans` are named positions of the clean prompt. `location` is for messages. `corrupted_answer` [n]
    follows the corrupted prompt, by default the answer. `is_contrast`: see `PromptPair`.
    """

    name: str
    group: str
    clean: Ids
    corrupted: Ids
    answer: Ids
    wrong: Ids
    aligned: int
    spans: Mapping[str, range] = field(default_factory=dict)
    location: str = ""
    is_contrast: bool = True
    corrupted_answer: Ids | None = None

    def aligned_span(self, name: str) -> range:
        """Positions as `span` takes them, counted from the first aligned one.

        Raises BadInput for those of `span`, and if they begin before the aligned positions.
        """
        first, span = len(self.clean) - self.aligned, self.span(name)
        if span.start < first:
            raise BadInput(
                f"{self._place}: span '{name}' starts at token {span.start}, but the prompts correspond only from "
                f"token {first} on. Patch other positions"
            )
        return range(span.start - first, span.stop - first)

    def span(self, name: str, reserved: Sequence[str] = RESERVED_SPAN_NAMES) -> range:
        """The positions of a named span of the clean prompt, or those that are named by number, such as -1 or 3:7.

        Raises BadInput if the pair lacks the span, or if the prompt lacks these tokens. `reserved` are the other names
        of positions that the probe takes, for the message.
        """
        if name in self.spans:
            return self.spans[name]
        if (numbers := parse_positions(name)) is None:
            names = [*self.spans, LAST_SPAN]
            raise BadInput(
                f"{self._place}: it has no span '{name}'{did_you_mean(name, names)}. Use {', '.join(names)}, a token "
                f"such as 3 or -1, a range such as 3:7, {' or '.join(reserved)}"
            )
        return resolve_positions(name, numbers, len(self.clean), self._place)

    @property
    def _place(self) -> str:
        """Where the pair comes from, for messages."""
        return self.location or f"prompt pair '{self.name}'"

    @property
    def has_equal_lengths(self) -> bool:
        """Whether both prompts have the same number of tokens."""
        return len(self.clean) == len(self.corrupted)


def read_prompt_pairs(file: str, *, needs_corrupted: bool = True) -> list[PromptPair]:
    """The pairs in a file with one JSON object per line: the fields of `PromptPair`.

    name, clean, corrupted and answer are required; without `needs_corrupted`, the clean prompt stands for a missing
    corrupted one. Raises ResourceMissing if the file does not exist, BadInput naming
    the first invalid line.
    """
    pairs = [
        _parse_pair(content, location, needs_corrupted)
        for location, content in input_files.read_json_lines(file, "file of prompt pairs")
    ]
    if not pairs:
        raise BadInput(f"'{file}' has no prompt pair. Write JSON objects with the keys {', '.join(_REQUIRED_FIELDS)}")
    names: set[str] = set()
    for pair in pairs:
        if pair.name in names:
            raise BadInput(f"{pair.location}: the name {user_input.quote(pair.name)} is already used. Use another one")
        names.add(pair.name)
    refuse_copies(
        (pair.location, (pair.clean, pair.corrupted, pair.answer, pair.wrong, pair.corrupted_answer)) for pair in pairs
    )
    return pairs


def refuse_unread_answers(file: str, metric: str, options: Collection[str] = PAIR_OPTIONS) -> None:
    """Raise BadInput for a pair with a corrupted answer if the metric does not read what follows the prompt.

    `options`: as in `tokenize_pair`.
    """
    if metric not in METRICS_OF_LAST_TOKEN:
        return
    other = ", or use --metric nll" if "metric" in options else ""
    for pair in read_prompt_pairs(file):
        if pair.corrupted_answer:
            raise BadInput(
                f"{pair.location}: 'corrupted_answer' changes nothing for the metric {metric}, which reads the "
                f"prediction at the last token of the prompt. Remove it{other}"
            )


def tokenize_pair(
    tokenizer: Any,
    pair: PromptPair,
    alignment: Alignment = "equal",
    *,
    needs_one_token: bool,
    needs_wrong: bool,
    options: Collection[str] = PAIR_OPTIONS,
) -> TokenPair:
    """The pair in tokens, each prompt after the tokenizer's leading special tokens.

    `needs_one_token`: the answers must be single tokens. `needs_wrong`: the wrong answer must be given. Raises BadInput
    for prompts of different lengths (if `alignment` is "equal"), prompts without a common last token (if "end"), equal
    prompts (if either) that the same answer follows, equal answers, and answers that the metric cannot use; the message
    may advise to change those of `PAIR_OPTIONS` that are in `options`.
    """
    location = pair.location or f"prompt pair '{pair.name}'"
    clean, corrupted = (
        tokenize_plain(tokenizer, text) if pair.has_template else _tokenize_prompt(tokenizer, text)
        for text in (pair.clean, pair.corrupted)
    )
    common = common_suffix_length(clean, corrupted)
    if len(clean) != len(corrupted) and alignment == "equal":
        raise BadInput(
            f"{location}: the clean prompt has {len(clean)} tokens and the corrupted prompt {len(corrupted)}. Make "
            f"them equal{', or use --align end' if common and 'align' in options else ''}"
        )
    aligned = len(clean) if alignment == "equal" else common
    if aligned == 0 and alignment == "end":
        raise BadInput(f"{location}: the two prompts end in different tokens. End both prompts with the same token")
    if np.array_equal(clean, corrupted) and alignment in ("equal", "end") and not pair.corrupted_answer:
        raise BadInput(f"{location}: clean and corrupted prompt are the same {len(clean)} tokens. Change one of them")
    answer = _answer_tokens(tokenizer, pair.clean, pair.answer, location)
    wrong = answer[:0]
    if pair.wrong:
        wrong = _answer_tokens(tokenizer, pair.clean, pair.wrong, location)
        if np.array_equal(answer, wrong):
            text = user_input.quote(decode_tokens(tokenizer, answer))
            raise BadInput(f"{location}: answer and wrong answer are the same tokens, {text}. Change one")
    elif needs_wrong:
        other = f", or use --metric {'logprob' if len(answer) == 1 else 'nll'}" if "metric" in options else ""
        raise BadInput(f"{location}: it has no wrong answer, which the metric needs. Add 'wrong'{other}")
    for key, text, ids in (("answer", pair.answer, answer), ("wrong", pair.wrong, wrong)):
        if needs_one_token and len(ids) > 1:
            tokens = " + ".join(repr(decode_tokens(tokenizer, ids[at : at + 1])) for at in range(len(ids)))
            name = f"'{key}'" if pair.location else f"--{key}"
            other = ", or --metric nll" if "metric" in options else ""
            if other and pair.wrong and not pair.location:
                other += " without --wrong"
            raise BadInput(
                f"{location}: {name} {user_input.quote(text)} is {len(ids)} tokens, {tokens}. Use an answer of one "
                f"token{other}"
            )
    corrupted_answer = None
    if pair.corrupted_answer:
        corrupted_answer = _answer_tokens(tokenizer, pair.corrupted, pair.corrupted_answer, location)
        if len(corrupted_answer) != len(answer):
            raise BadInput(
                f"{location}: 'corrupted_answer' has {len(corrupted_answer)} tokens, and the answer {len(answer)}. "
                "Use the same number of tokens"
            )
    spans = _token_spans(tokenizer, pair, len(clean), location)
    names = (pair.name, pair.group)
    return TokenPair(
        *names, clean, corrupted, answer, wrong, aligned, spans, location, pair.is_contrast, corrupted_answer
    )


def common_suffix_length(a: Ids, b: Ids) -> int:
    """The number of last tokens that two sequences share."""
    shorter = min(len(a), len(b))
    differ = np.flatnonzero(a[len(a) - shorter :] != b[len(b) - shorter :])
    return shorter - 1 - int(differ[-1]) if len(differ) else shorter


def continuation_tokens(tokenizer: Any, text: str, continuation: str) -> Ids | None:
    """The tokens that `continuation` adds to those of `text`; None if it changes the last tokens of the text."""
    before, joined = tokenize_plain(tokenizer, text), tokenize_plain(tokenizer, text + continuation)
    return joined[len(before) :] if np.array_equal(joined[: len(before)], before) else None


_REQUIRED_FIELDS = ("name", "clean", "corrupted", "answer")
_INTERNAL_FIELDS = ("location", "has_template", "is_contrast")
_OPTIONAL_FIELDS = [item.name for item in fields(PromptPair) if item.name not in _REQUIRED_FIELDS + _INTERNAL_FIELDS]


def _parse_pair(content: Any, location: str, needs_corrupted: bool) -> PromptPair:
    """The pair in one line of a file. Raises BadInput naming the line."""
    if isinstance(content, dict) and not needs_corrupted and not content.get("corrupted"):
        content = {**content, "corrupted": content.get("clean", "")}
    input_files.check_keys(content, location, _REQUIRED_FIELDS, _OPTIONAL_FIELDS)
    texts = {key: value for key, value in content.items() if key != "spans"}
    if wrong_type := next((key for key, value in texts.items() if not isinstance(value, str)), None):
        raise BadInput(f"{location}: '{wrong_type}' is {user_input.quote(content[wrong_type])}. Write a string")
    pair = PromptPair(**texts, spans=_parse_spans(content.get("spans", {}), location), location=location)
    for key, description in (("clean", "clean prompt"), ("corrupted", "corrupted prompt"), ("answer", "answer")):
        if not (content[key] if key == "answer" else content[key].strip()):  # a line break can be an answer
            raise BadInput(f"{location}: the {description} is empty. Write a text")
    if pair.answer == pair.wrong:
        raise BadInput(f"{location}: answer and wrong answer are both {user_input.quote(pair.answer)}. Change one")
    try:
        for text in (pair.name, pair.group, *pair.spans):
            user_input.check_text(text)
    except ValueError as error:
        raise BadInput(f"{location}: {error}") from error
    return pair


def _parse_spans(content: Any, location: str) -> dict[str, str | tuple[int, int]]:
    """The spans in one line of a file. Raises BadInput naming the line and the span."""
    if not isinstance(content, dict):
        raise BadInput(
            f'{location}: \'spans\' is {user_input.quote(content)}. Write names and texts, as in {{"x": " Mary"}}'
        )
    spans: dict[str, str | tuple[int, int]] = {}
    for name, value in content.items():
        if name in RESERVED_SPAN_NAMES or parse_positions(name) is not None or not name.strip() or "," in name:
            raise BadInput(f"{location}: a span cannot be named {user_input.quote(name)}. Use another name")
        is_range = isinstance(value, list) and [type(end) for end in value] == [int, int] and 0 <= value[0] < value[1]
        if not is_range and not (isinstance(value, str) and value.strip()):
            raise BadInput(
                f"{location}: span '{name}' is {user_input.quote(value)}. Write a text of the clean prompt, or its "
                "first token and the one after its last, as in [3, 5]"
            )
        spans[name] = value if isinstance(value, str) else (value[0], value[1])
    return spans


def _token_spans(tokenizer: Any, pair: PromptPair, length: int, location: str) -> dict[str, range]:
    """The spans of a pair as positions of its clean prompt of `length` tokens."""
    spans = {}
    for name, value in pair.spans.items():
        if isinstance(value, str):
            text = value.strip()
            if (occurrences := pair.clean.count(text)) != 1:
                raise BadInput(
                    f"{location}: {user_input.quote(text)} of span '{name}' occurs {occurrences} times in the clean "
                    "prompt. Use a text that occurs once, or tokens, as in [3, 5]"
                )
            offsets = token_offsets(tokenizer, pair.clean)
            if offsets is None:
                raise BadInput(
                    f"{location}: the tokenizer does not say which tokens hold {user_input.quote(text)} of span "
                    f"'{name}'. Give its tokens, as in [3, 5]"
                )
            spans[name] = _text_span(offsets, pair.clean.index(text), len(text), length)
        else:
            spans[name] = range(*value)
            if value[1] > length:
                raise BadInput(
                    f"{location}: span '{name}' ends at token {value[1]}, but the clean prompt has {length} tokens. "
                    "Use a lower end"
                )
    return spans


def _text_span(offsets: Sequence[tuple[int, int]], start: int, characters: int, length: int) -> range:
    """The positions, in a prompt of `length` tokens that end with these, of the tokens that hold some characters."""
    inside = [at for at, (first, end) in enumerate(offsets) if first < start + characters and end > start]
    leading = length - len(offsets)
    return range(leading + inside[0], leading + inside[-1] + 1)


def _tokenize_prompt(tokenizer: Any, text: str) -> Ids:
    """Tokens of a prompt after the tokenizer's leading special tokens."""
    leading = np.array(leading_special_tokens(text, tokenizer), np.int32)
    return np.concatenate([leading, tokenize_plain(tokenizer, text)])


def _answer_tokens(tokenizer: Any, prompt: str, answer: str, location: str) -> Ids:
    """The tokens of an answer after the prompt. Raises BadInput if it changes the last tokens of the prompt."""
    ids = continuation_tokens(tokenizer, prompt, answer)
    if ids is not None and len(ids) == 0:
        raise BadInput(
            f"{location}: the tokenizer writes no token for the answer {user_input.quote(answer)}. Change it"
        )
    if ids is None:
        raise BadInput(
            f"{location}: the answer {user_input.quote(answer)} merges with the last token of the prompt. Move the "
            "space at the end of the prompt to the start of the answer"
        )
    return ids
