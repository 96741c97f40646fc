"""What the detectors store: the mean weight of every head on each kind of key, by sequence."""

from headscope.runs.columns import GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table, key

DETECTORS = Table(
    "detectors",
    "which keys each head looks at on random tokens that come twice",
    (
        MODEL,
        LENGTH,
        key("sequence", "index32", "", "number of the random sequence; models of one tokenizer have the same ones"),
        LAYER,
        HEAD,
        GROUP,
        key(
            "kind",
            "label",
            "",
            "the key of row i, of m random tokens that come twice: previous i - 1, current i, first 0, and in the "
            "second half duplicate i - m and induction i - m + 1. A kind that no row of the layer sees is left out, as "
            "where its window is shorter than m",
            None,
        ),
        Column("score", "value", "", "mean weight on that key over the rows that see it", 0, 1),
        Column("chance", "value", "", "the same if every row spread its weight evenly: mean of 1 / visible keys", 0, 1),
        Column("rows", "count", "rows", "query rows that were averaged", 1),
    ),
)

TABLES = (DETECTORS,)
