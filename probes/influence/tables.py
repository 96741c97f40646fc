"""What the influence probe stores: the loss with one unit changed, and with sets of them, of texts and of answers."""

from headscope.runs.columns import DOC, GROUP, LAYER, LENGTH, MODEL, Column, Table, key

SWEEP_KEYS = ["model", "context_length", "component", "target", "objective"]
"""What names one sweep; which objective it has is told by its table."""
UNIT_COLUMNS = ["layer", "kv_group", "head"]
"""What names a unit of a sweep."""

UNIT_HEAD = key(
    "head", "index16", "", "query head within the layer, from 0; -1 where the unit is the whole KV group", -1
)
COMPONENT = key(
    "component",
    "label",
    "",
    "what was reset: freq (log-frequencies), scale (tau, gamma), joint (both); or the intervention: zero, mean, "
    "uniform, pairs-zero:BAND or pairs-unrotated:BAND for a band of rotary pairs (A-B, or short, middle, long by "
    "wavelength), a user's own",
    None,
)
TARGET = key("target", "label", "", "what it was reset to: init or base; none where nothing is reset", None)

METHOD = key(
    "method",
    "label",
    "",
    "exact: evaluated; screen: first order in the head's output; curved: with its second order [ours]",
    None,
)
LOSS_BEFORE = Column("nll_before", "value", "nats/token", "mean next-token loss with nothing changed", 0)
LOSS_CHANGE = Column(
    "delta_nll", "value", "nats/token", "loss after minus loss before; positive where the change hurts"
)

NAMED_SET_PREFIX = "set:"
"""What the choice of a set that the user named begins with; the name follows."""
SET_COLUMNS = (
    COMPONENT,
    TARGET,
    key("unit", "label", "", "what the set consists of: group or head", None),
    key(
        "choice",
        "label",
        "",
        "top: the units of largest influence over all documents; random: as many from the same layers; set:NAME: the "
        "heads that the user gave that name [ours]",
        None,
    ),
    key("size", "index16", "units", "how many units are changed together", 1),
    key("draw", "index16", "", "number of the random draw; 0 for the top set"),
)
TRIAL_COLUMNS = (
    DOC,
    key("fact", "label", "", "name of the fact that was hidden in the document and asked for", None),
    key("depth", "value", "", "where it was to begin, as a share of the document; it begins with a sentence", 0, 1),
)
TOP1_ACCURACY = Column(
    "hits", "value", "", "share of the answer's tokens that the unchanged model finds likeliest [ours]", 0, 1
)
ANSWER_LOSS_BEFORE = Column(
    "nll_before", "value", "nats/token", "mean loss of the answer's tokens with nothing changed", 0
)

INFLUENCE = Table(
    "influence",
    "what the loss of a document becomes when one unit, a KV group or a head, is changed: its position parameters are "
    "reset, or something is taken from it",
    (MODEL, LENGTH, DOC, LAYER, UNIT_HEAD, GROUP, COMPONENT, TARGET, METHOD, LOSS_BEFORE, LOSS_CHANGE),
)
INFLUENCE_SETS = Table(
    "influence_sets",
    "the same for sets of units that are changed together: the most influential ones against random ones, or all",
    (MODEL, LENGTH, DOC, *SET_COLUMNS, LOSS_BEFORE, LOSS_CHANGE),
)
INFLUENCE_ANSWERS = Table(
    "influence_answers",
    "what the loss of an answer about a hidden fact becomes when one unit is changed: of the scored part of the fact, "
    "token by token after the prompt",
    (
        MODEL,
        LENGTH,
        *TRIAL_COLUMNS,
        LAYER,
        UNIT_HEAD,
        GROUP,
        COMPONENT,
        TARGET,
        METHOD,
        TOP1_ACCURACY,
        ANSWER_LOSS_BEFORE,
        LOSS_CHANGE,
    ),
)
INFLUENCE_ANSWER_SETS = Table(
    "influence_answer_sets",
    "the same for sets of units that are changed together",
    (MODEL, LENGTH, *TRIAL_COLUMNS, *SET_COLUMNS, TOP1_ACCURACY, ANSWER_LOSS_BEFORE, LOSS_CHANGE),
)

TABLES = (INFLUENCE, INFLUENCE_SETS, INFLUENCE_ANSWERS, INFLUENCE_ANSWER_SETS)
UNIT_TABLES = {"text": INFLUENCE.name, "answer": INFLUENCE_ANSWERS.name}
"""The table of single units, by objective."""
SET_TABLES = {"text": INFLUENCE_SETS.name, "answer": INFLUENCE_ANSWER_SETS.name}
