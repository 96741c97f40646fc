"""What the influence probe stores: the loss with one unit reset, and with sets of them."""

from headscope.runs.columns import DOC, GROUP, LAYER, LENGTH, MODEL, Column, Table, key

SWEEP = ["model", "context_length", "component", "target"]
"""What names one sweep."""
PLACE = ["layer", "kv_group", "head"]
"""What names a unit of a sweep."""

UNIT_HEAD = key(
    "head", "index16", "", "query head within the layer, from 0; -1 where the unit is the whole KV group", -1
)
COMPONENT = key(
    "component",
    "label",
    "",
    "what was reset: freq (log-frequencies), scale (tau, gamma), joint (both); or the intervention: z-zero, z-mean, "
    "q-uniform, a user's own",
    None,
)
TARGET = key("target", "label", "", "what it was reset to: init or base; none where nothing is reset", None)

INFLUENCE = Table(
    "influence",
    "what the loss of a document becomes when the position parameters of one unit, a KV group or a head, are reset",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        UNIT_HEAD,
        GROUP,
        COMPONENT,
        TARGET,
        key(
            "method",
            "label",
            "",
            "exact: evaluated; screen: first order in the head's output; curved: with its second order [ours]",
            None,
        ),
        Column("nll_before", "value", "nats/token", "mean next-token loss with nothing reset", 0),
        Column("delta_nll", "value", "nats/token", "loss after minus loss before; positive where the reset hurts"),
    ),
)

INFLUENCE_SETS = Table(
    "influence_sets",
    "the same for sets of units that are reset together: the most influential ones against random ones",
    (
        MODEL,
        LENGTH,
        DOC,
        COMPONENT,
        TARGET,
        key("unit", "label", "", "what the set consists of: group or head", None),
        key(
            "choice",
            "label",
            "",
            "top: the units of largest influence over all documents; random: as many from the same layers [ours]",
            None,
        ),
        key("size", "index16", "units", "how many units are reset together", 1),
        key("draw", "index16", "", "number of the random draw; 0 for the top set"),
        Column("nll_before", "value", "nats/token", "mean next-token loss with nothing reset", 0),
        Column("delta_nll", "value", "nats/token", "loss after minus loss before, evaluated exactly"),
    ),
)

TABLES = (INFLUENCE, INFLUENCE_SETS)
