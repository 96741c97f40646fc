"""Collects the top attended tokens of sampled query rows while a model reads a document or a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from torch import Tensor

from headscope.base.user_input import quote
from headscope.errors import BadInput
from headscope.forward.capture import CapturedLayers
from headscope.forward.observe import FinishedPass, observe
from headscope.measures.pooled_map import PooledMaps
from headscope.measures.top_keys import TopKeysAccumulator, stratified_rows
from headscope.positions.model import Model
from headscope.prompts.texts import TokenDocument
from headscope.prompts.token_text import token_texts
from headscope.runs.arrow import Rows, encode_map
from headscope.study.cells import PassCell, TextPass, document_of, pass_cost
from headscope.study.context import StudyContext
from headscope.study.digests import digest_tokenizer
from headscope.study.prompts import ProbeTexts
from probes.patterns.declaration import PatternsOptions
from probes.patterns.results import find_token


@dataclass(frozen=True)
class _PatternWork:
    tokenizer: str
    """Digest of the tokenizer and the text, by which models share stored tokens."""
    stores_tokens: bool
    """Whether this is the cell that stores the document's tokens."""


class PatternsRunner:
    """Cells: each (model, context length, document), or each model with the prompt.

    It only observes, so its passes are shared with other probes.
    """

    def __init__(self, options: PatternsOptions, context: StudyContext):
        self.options, self.context = options, context
        self.texts = ProbeTexts(options, options.lengths, context)

    def cells(self) -> list[PassCell[_PatternWork]]:
        cells, stored = [], set()
        for label in self.context.labels:
            documents = self.texts.documents(label)
            self._check_tokens(label, documents[0].ids)
            longest = len(documents[0].ids)
            tokenizer = digest_tokenizer(self.context.tokenizer(label))
            for length in self.texts.lengths(label):
                for number, document in enumerate(documents):
                    tokens = sha256(f"{tokenizer} {document.digest}".encode()).hexdigest()[:12]
                    is_new = length == longest and (tokens, number) not in stored
                    if is_new:
                        stored.add((tokens, number))
                    name = f"{label}: {length} tokens, {document.name}"
                    work, text_pass = _PatternWork(tokens, is_new), TextPass.over(document.ids[:length], number)
                    cells.append(PassCell(name, label, pass_cost(length), work, text_pass=text_pass))
        return cells

    def _check_tokens(self, label: str, ids: Sequence[int]) -> None:
        """Raise BadInput if the prompt has no token with the text of the option `query` or `key`."""
        for name in ("query", "key"):
            if (token := getattr(self.options, name)) is None:
                continue
            prompt, _ = token_texts(self.context.tokenizer(label), ids)
            if find_token(prompt, token) is None:
                raise BadInput(
                    f"no token of the prompt is {quote(token)} ('{name}'): its tokens in '{label}' are "
                    f"{quote(prompt)}. Use one of them"
                )

        if self.options.query is not None and self.options.key is not None:
            prompt, _ = token_texts(self.context.tokenizer(label), ids)
            query, key = (find_token(prompt, token) for token in (self.options.query, self.options.key))
            if query is not None and key is not None and query < key:
                raise BadInput(
                    f"the key {quote(self.options.key)} is after the query {quote(self.options.query)}: a token "
                    "attends to earlier ones only. Exchange 'query' and 'key'"
                )

    def token_ids(self, cell: PassCell) -> Sequence[int]:
        document, length = document_of(cell, self.texts.documents)
        return document.ids[:length]

    def observer(self, cell: PassCell, model: Model, ids: Tensor) -> "PatternsObserver":
        document, length = document_of(cell, self.texts.documents)
        count = length if self.texts.is_prompt and self.options.rows else self.options.rows
        top_keys = None
        if count:
            rows = stratified_rows(length, count, self.context.seed + cell.text_pass.document)
            top_keys = TopKeysAccumulator(model.geometry, rows, self.options.keys)
        keys = {"model": cell.model, "context_length": length, "doc": document.name}
        tokenizer = self.context.tokenizer(cell.model) if cell.work.stores_tokens else None
        is_mapped = (
            (self.options.map or self.texts.is_prompt) and cell.text_pass.document == 0 and length == len(document.ids)
        )
        maps = PooledMaps(model.geometry, length) if is_mapped else None
        return PatternsObserver(top_keys, keys, cell.work.tokenizer, tokenizer, document, maps)


class PatternsObserver:
    """Collects `top_keys` and `maps` of one pass, if given; stores the document's tokens if `tokenizer` is given."""

    needs_whole_text = False

    def __init__(
        self,
        top_keys: TopKeysAccumulator | None,
        keys: Mapping[str, Any] | None = None,
        tokenizer_digest: str = "",
        tokenizer: Any = None,
        document: TokenDocument | None = None,
        maps: PooledMaps | None = None,
    ):
        self.top_keys, self.keys, self.maps = top_keys, keys or {}, maps
        self.tokenizer_digest, self.tokenizer, self.document = tokenizer_digest, tokenizer, document

    def listen(self, layers: CapturedLayers) -> None:
        if self.top_keys is not None:
            layers.listen(self.top_keys.update)
        if self.maps is not None:
            layers.listen(self.maps.update)

    def tables(self, finished_pass: FinishedPass) -> dict[str, Rows]:
        rows = 0 if self.top_keys is None else len(self.top_keys.rows)
        tables: dict[str, Rows] = {"pattern_texts": {**self.keys, "tokenizer": [self.tokenizer_digest], "rows": rows}}
        if self.top_keys is not None:
            tables["top_keys"] = {**self.keys, **self.top_keys.compute()}
            if len((far_keys := self.top_keys.compute_far_keys())["query"]):
                tables["far_keys"] = {**self.keys, **far_keys}
        if self.maps is not None:
            tables["attention_maps"] = {**self.keys, **_map_rows(self.maps)}
        if self.tokenizer is not None and self.document is not None:
            tables["token_text"] = _token_rows(self.tokenizer, self.tokenizer_digest, self.document)
        return tables


def _map_rows(maps: PooledMaps) -> dict[str, Any]:
    """Columns of the table `attention_maps`, sorted by layer, head and block."""
    geometry, by_layer = maps.geometry, sorted(maps.compute().items())
    heads = np.array([(layer, head) for layer, pooled in by_layer for head in range(len(pooled))])
    layer, head = heads.repeat(maps.blocks, axis=0).T
    return {
        "layer": np.array(geometry.layer_numbers)[layer],
        "head": head,
        "kv_group": geometry.kv_group(layer, head),
        "query_block": np.tile(np.arange(maps.blocks), len(heads)),
        "weights": [row for _, of_layer in by_layer for pooled in of_layer.numpy() for row in encode_map(pooled)],
    }


def collect_top_keys(model: Model, ids: Tensor, rows: Tensor, max_keys: int) -> TopKeysAccumulator:
    """The top keys of these query rows of ids [L] in every head, under the model's scheme."""
    top_keys = TopKeysAccumulator(model.geometry, rows, max_keys)
    observe(model, ids, [lambda _: PatternsObserver(top_keys)])
    return top_keys


def _token_rows(tokenizer: Any, tokenizer_digest: str, document: TokenDocument) -> Rows:
    """Rows of the table `token_text`."""
    token_text, is_special = token_texts(tokenizer, document.ids)
    return {
        "tokenizer": tokenizer_digest,
        "doc": document.name,
        "position": list(range(len(document.ids))),
        "token": document.ids,
        "text": token_text,
        "special": is_special,
    }
