"""What reading stores: which texts were read, their tokens once each, and the keys of most weight, row by row."""

from headscope.runs.columns import DOC, GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table, key

TOKENIZER_MEANING = (
    "first digits of a digest of the text and of the tokenizer whose tokens these are; models share one or not"
)
QUERY = key("query", "index32", "tokens", "position i of the token that looks")

PATTERN_TEXTS = Table(
    "passages",
    "which texts were read under which model",
    (
        MODEL,
        LENGTH,
        DOC,
        Column("tokenizer", "label", "", TOKENIZER_MEANING),
        Column("rows", "index32", "rows", "query rows that were kept, the same in every layer and head", 1),
    ),
)

TOKEN_TEXT = Table(
    "pieces",
    "the tokens of each text that was read, once a tokenizer and at the longest length",
    (
        key("tokenizer", "label", "", TOKENIZER_MEANING, None),
        DOC,
        key("position", "index32", "tokens", "place of the token in the text, from 0"),
        Column("token", "index32", "", "number of the token in the vocabulary", 0),
        Column(
            "piece",
            "text",
            "",
            "what the token adds to the text, so that all pieces joined are the text; a character that is split over "
            "tokens stands on its last one, the others are empty; a special token by its name",
        ),
        Column("special", "flag", "", "whether it is a special token, whose name is no text"),
    ),
)

TOP_KEYS = Table(
    "reads",
    "the keys of most weight in query rows that are the same for all heads, layers and models",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        QUERY,
        key("rank", "index16", "", "place by weight, from 0; of equal weights the later key comes first"),
        Column("key", "index32", "tokens", "position j of the token that is looked at", 0),
        Column("weight", "value", "", "weight of that key in the row", 0, 1),
    ),
)

FAR_KEYS = Table(
    "far_reads",
    "the key of most weight in each of these rows that is neither the first token nor within 32 tokens; rows that see "
    "none are left out",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        QUERY,
        Column("key", "index32", "tokens", "position j of the token that is looked at", 0),
        Column("weight", "value", "", "weight of that key in the row", 0, 1),
    ),
)

TABLES = (PATTERN_TEXTS, TOKEN_TEXT, TOP_KEYS, FAR_KEYS)
