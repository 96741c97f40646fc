"""Tables of the needle probe: trials, retrieval scores, answers, attribution and ablation."""

from headscope.runs.columns import DOC, GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table, key

NEEDLE_KEYS = (
    key("needle", "label", "", "name of the needle, the hidden fact", None),
    LENGTH,
    key(
        "depth",
        "value",
        "",
        "requested position of the needle as a share of the haystack's tokens; it is inserted at the last start of a "
        "sentence up to there; span_start is the actual position",
        0,
        1,
    ),
    DOC,
    key("seed", "index32", "", "seed of the study plus the number of the haystack in its order"),
)
MODE = key(
    "mode",
    "label",
    "",
    "strict: exact span, score at most 1; indirect: strict, with a question in other words than the needle [ours]; wu: "
    "counted as in Wu et al.'s code; absent: control, a strict trial without the needle, scored at its position [ours]",
    None,
)

NEEDLES = Table(
    "needles",
    "Needle-in-a-Haystack trials: the answer of each model",
    (
        MODEL,
        MODE,
        *NEEDLE_KEYS,
        Column("prompt_tokens", "index32", "tokens", "length of the whole prompt", 1),
        Column("span_start", "index32", "tokens", "first token of the scored part of the needle in the prompt", 0),
        Column("span_end", "index32", "tokens", "end of the scored part (exclusive)", 0),
        Column("answer", "text", "", "the model's greedy answer up to the end token or a line break"),
        Column(
            "recall", "value", "", "ROUGE-1 recall of the scored part's words in the answer, no stemming [ours]", 0, 1
        ),
        Column("success", "flag", "", "whether recall is above 0.5"),
        Column("steps", "index32", "tokens", "answer steps that were scored", 0),
    ),
)

RETRIEVAL = Table(
    "retrieval",
    "retrieval score of each head in each trial, successful or not",
    (
        MODEL,
        MODE,
        LAYER,
        HEAD,
        GROUP,
        *NEEDLE_KEYS,
        Column(
            "score",
            "value",
            "",
            "strict, indirect, absent: share of the scored part's tokens that the head copied at some step; wu: copies "
            "/ tokens, above 1 with repeats. A copy: the largest weight of the query that outputs a token is on an "
            "equal token of the scored part",
            0,
        ),
        Column("copies", "index32", "steps", "answer steps at which the head copied", 0),
        Column("mass", "value", "", "mean weight on the scored part over answer steps; 0 without a step [ours]", 0, 1),
    ),
)

NEEDLE_TOKENS = Table(
    "needle_tokens",
    "the prompt around each needle, without controls",
    (
        MODEL,
        MODE,
        *NEEDLE_KEYS,
        Column("before", "text", "", "the haystack just before the needle"),
        Column("cue", "text", "", "the opening of the needle, which is not scored"),
        Column("scored", "text", "", "the rest of the needle, which is scored"),
        Column("after", "text", "", "the haystack just after the needle"),
        Column("question", "text", "", "the end of the prompt: the question and the beginning of the answer"),
    ),
)

ANSWER_STEP = key("step", "index16", "steps", "scored answer step, from 0")

NEEDLE_STEPS = Table(
    "needle_steps",
    "each answer token by token, without controls",
    (
        MODEL,
        MODE,
        *NEEDLE_KEYS,
        ANSWER_STEP,
        Column(
            "text", "text", "", "text that the token adds to the answer; a split character belongs to its last token"
        ),
    ),
)

NEEDLE_COPIES = Table(
    "needle_copies",
    "heads that copied a token of the needle, by answer step, without controls",
    (
        MODEL,
        MODE,
        *NEEDLE_KEYS,
        ANSWER_STEP,
        LAYER,
        HEAD,
        GROUP,
        Column("key", "index32", "tokens", "position of the copied token in the prompt", 0),
    ),
)

NEEDLE_ATTRIBUTION = Table(
    "needle_attribution",
    "direct logit attribution of each head to the answer in each trial, successful or not",
    (
        MODEL,
        MODE,
        LAYER,
        HEAD,
        GROUP,
        *NEEDLE_KEYS,
        Column(
            "through",
            "value",
            "logits",
            "mean over answer tokens of the attribution through the needle's tokens, cue included (absent: through the "
            "tokens at its position), minus the mean over the vocabulary, with frozen normalisation scales",
        ),
        Column("rest", "value", "logits", "attribution through all other tokens"),
    ),
)

ABLATION_KEYS = (
    key("ablation", "label", "", "zero: outputs set to zero; mean: outputs set to their mean over the haystack", None),
    key("size", "index16", "heads", "number of heads ablated together", 1),
    key(
        "draw",
        "index16",
        "",
        "0: the top heads by score over the successful trials of the other half of the needles; from 1: random "
        "heads, as "
        "many in each layer, avoiding the top heads if possible [ours]",
    ),
)

NEEDLE_ABLATION = Table(
    "needle_ablation",
    "the answer of each model with some of its heads ablated",
    (
        MODEL,
        MODE,
        *ABLATION_KEYS,
        *NEEDLE_KEYS,
        Column("answer", "text", "", "the model's greedy answer up to the end token or a line break"),
        Column("recall", "value", "", "ROUGE-1 recall of the scored part's words in the answer", 0, 1),
        Column("success", "flag", "", "whether recall is above 0.5"),
    ),
)

NEEDLE_ABLATED_HEADS = Table(
    "needle_ablated_heads",
    "heads that were ablated together",
    (
        MODEL,
        *ABLATION_KEYS,
        key(
            "half",
            "index16",
            "",
            "half of the needles that was tested: 0 for needles 1, 3, ...; 1 for needles 2, 4, ...",
        ),
        LAYER,
        HEAD,
        GROUP,
        Column("score", "value", "", "score of the head over the other half of the needles"),
    ),
)

TABLES = (
    NEEDLES,
    RETRIEVAL,
    NEEDLE_TOKENS,
    NEEDLE_STEPS,
    NEEDLE_COPIES,
    NEEDLE_ATTRIBUTION,
    NEEDLE_ABLATION,
    NEEDLE_ABLATED_HEADS,
)
