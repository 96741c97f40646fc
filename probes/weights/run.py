"""Runner of the probe `weights`: cells that read weights, and cells that observe forward passes over texts."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.base.heads import parse_head
from headscope.decomposition.attributed_rows import find_rows, find_top_far_rows
from headscope.decomposition.head_circuits import LayerCircuits, TokenEmbeddings, ov_logits
from headscope.decomposition.head_weights import ModelWeights, inspect_head_weights
from headscope.decomposition.qk_attribution import QKAttribution, attribute_qk
from headscope.decomposition.residual_inspection import decompose_residual_stream
from headscope.decomposition.token_pairs import pair_logits
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.capture import CapturedLayers, capturing
from headscope.forward.observe import FinishedPass
from headscope.interventions.heads import layer_heads
from headscope.measures.circuits import (
    CompositionNull,
    composition_scores,
    random_composition,
    receiver_factors,
    sender_factors,
)
from headscope.measures.positional_preference import PositionalPreference
from headscope.measures.value_attention import ValueWeightedRows
from headscope.positions.model import Model
from headscope.prompts.texts import TokenDocument
from headscope.rendering.text import to_visible_line
from headscope.runs.arrow import Rows
from headscope.scores import model_heads
from headscope.study.cells import Cell, PassCell, TextPass, document_of, pass_cost
from headscope.study.context import StudyContext
from headscope.study.prompts import ProbeTexts
from probes.weights.declaration import (
    ALL_OTHERS,
    MIN_FAR_LENGTH,
    QK_COMPONENTS,
    QK_PAIRS,
    QK_ROWS,
    SIDES,
    TOP_FAR_ROWS,
    WeightsOptions,
)

WEIGHTS_COST, COMPOSITION_COST = 4e3, 4e4
"""Cost of reading all weights, and of all pairs of heads, in units of `pass_cost`."""
TEXT_PARTS = {"distance", "values"}
"""Parts that observe a forward pass over a text."""
SAMPLED_ROWS = 64
"""Query rows per text and head for value-weighted attention."""
SCORE_STEP = 2.0**-14
"""Stored composition scores are multiples of it, far below what matters, so that the table takes half the space."""
TOP_PAIRS = 12
"""Pairs of components that are stored per row and key."""
TEXT_CONTEXT = 8
"""Tokens before a query or key in its stored text."""


class WeightsRunner:
    """Cells: the weights of each model, its composition, and each (model, context length, document)."""

    def __init__(self, options: WeightsOptions, context: StudyContext):
        self.options, self.context = options, context
        self.texts = ProbeTexts(options, options.lengths, context)
        self._weights: tuple[Any, ModelWeights] | None = None

    def cells(self) -> list[Cell]:
        options = self.options
        cells: list[Cell] = []
        for label in self.context.labels:
            self._check_heads_and_rows(label)
            if TEXT_PARTS & {*options.parts}:
                for length, number, name in self._texts(label):
                    text_pass = TextPass.over(self._documents(label)[number].ids[:length], number)
                    cells.append(PassCell(name, label, pass_cost(length), text_pass=text_pass))
            if "weights" in options.parts or options.tokens or options.pairs:
                for word in self._words():
                    find_token(self.context.tokenizer(label), word)
                cells.append(Cell(f"{label}: weights", label, WEIGHTS_COST, "weights"))
            if "composition" in options.parts:
                cells.append(Cell(f"{label}: composition", label, COMPOSITION_COST, "composition"))
            for length, number, name in self._texts(label) if options.heads else ():
                cells.append(Cell(f"{name}, heads", label, 4 * pass_cost(length), _HeadsWork(length, number)))
        return cells

    def _check_heads_and_rows(self, label: str) -> None:
        """Refuse heads that the model lacks, rows beyond a text, and texts without a far row, before any work."""
        if self.options.heads:
            layer_heads(self.context.model(label), self.options.heads)
        shortest, rows = min(self.texts.lengths(label)), self.options.query_rows
        if rows and max(rows) >= shortest:
            raise BadInput(
                f"query row {max(rows)} is beyond the text, whose {shortest} tokens have rows 0 to {shortest - 1}. Use "
                "smaller query_rows"
            )
        if self.options.heads and not rows and shortest < MIN_FAR_LENGTH:
            raise BadInput(
                f"the text has {shortest} tokens: no row sees a key 32 or more tokens back that is not the first. Use "
                f"at least {MIN_FAR_LENGTH} tokens, or give the rows with query_rows"
            )

    def _texts(self, label: str) -> Iterator[tuple[int, int, str]]:
        """Length, number of the document, and a name of each text."""
        for length in self.texts.lengths(label):
            for number in range(len(self._documents(label))):
                yield length, number, f"{label}: {length} tokens, document {number}"

    def token_ids(self, cell: PassCell) -> Sequence[int]:
        document, length = document_of(cell, self._documents)
        return document.ids[:length]

    def observer(self, cell: PassCell, model: Model, ids: Tensor) -> "TextObserver":
        document, length = document_of(cell, self._documents)
        keys = {"model": cell.model, "context_length": length, "doc": document.name}
        seed = self.context.seed + cell.text_pass.document
        return TextObserver(model, ids, {*self.options.parts}, seed, keys)

    def compute_rows(self, cell: "Cell[str | _HeadsWork]", model: Model) -> Mapping[str, Rows]:
        weights = self._model_weights(model)
        with torch.no_grad():
            if isinstance(cell.work, _HeadsWork):
                tables = self._attribution_tables(cell.model, cell.work, model, weights)
            elif cell.work == "composition":
                tables = composition_tables(model, weights)
            else:
                tables = self._weights_tables(model, weights)
        return {name: {"model": cell.model, **rows} for name, rows in tables.items()}

    def _weights_tables(self, model: Model, weights: ModelWeights) -> dict[str, dict[str, Any]]:
        tables: dict[str, dict[str, Any]] = {}
        embeddings = TokenEmbeddings(model, weights, self.options.embedding == "first-mlp")
        if "weights" in self.options.parts:
            tables["head_circuits"] = circuit_rows(embeddings)
        if self.options.tokens:
            tokens = {word: find_token(model.tokenizer, word) for word in self.options.tokens}
            tables["ov_tokens"] = ov_token_rows(embeddings, tokens, self.options.top)
        if self.options.pairs:
            words = [tuple(pair.split(">")) for pair in self.options.pairs]
            tables["token_pairs"] = token_pair_rows(embeddings, words, self.options.distances)
        return tables

    def _attribution_tables(
        self, label: str, work: "_HeadsWork", model: Model, weights: ModelWeights
    ) -> dict[str, dict[str, Any]]:
        document = self._documents(label)[work.document]
        ids = torch.tensor(document.ids[: work.length])
        heads = [parse_head(head) for head in self.options.heads]
        if self.options.query_rows:
            rows = find_rows(model, ids, heads, self.options.query_rows)
        else:
            rows = find_top_far_rows(model, ids, heads, TOP_FAR_ROWS)
        attributions = attribute_qk(model, ids, [at for at, _ in rows], weights)
        keys = {"context_length": work.length, "doc": document.name}
        tables = attribution_tables(model, ids, attributions, [weight for _, weight in rows])
        return {name: {**keys, **columns} for name, columns in tables.items()}

    def _model_weights(self, model: Model) -> ModelWeights:
        """The weights of a checkpoint, which models under several schemes share."""
        source = (model.checkpoint, getattr(model.schedule, "lora_folder", None))
        if self._weights is None or self._weights[0] != source:
            self._weights = (source, inspect_head_weights(model))
        return self._weights[1]

    def _words(self) -> list[str]:
        return [*self.options.tokens, *(word for pair in self.options.pairs for word in pair.split(">"))]

    def _documents(self, label: str) -> list[TokenDocument]:
        return self.texts.documents(label)


@dataclass(frozen=True)
class _HeadsWork:
    """QK attribution in the first `length` tokens of a document."""

    length: int
    document: int


class TextObserver:
    """Collects the parts `distance` and `values` of one pass over ids [1, L]; `seed` draws the rows of `values`."""

    needs_whole_text = False

    def __init__(
        self, model: Model, ids: Tensor, parts: Collection[str], seed: int = 0, keys: Mapping[str, Any] | None = None
    ):
        self.model, self.keys, length = model, keys or {}, ids.shape[1]
        self.preference, self.values = None, None
        if "distance" in parts:
            self._refuse_distance_bias(model.schedule.slopes is not None)
            if not model.geometry.pairs:
                raise UnsupportedModel(
                    f"a positional logit curve is not possible for {model.spec}: {model.rotation.no_pairs_reason}. "
                    "Leave out distance: --parts weights,composition,values"
                )
            self.preference = PositionalPreference(model.geometry, length, model.schedule.theta)
        if "values" in parts:
            self.values = ValueWeightedRows(model.geometry, length, SAMPLED_ROWS, seed, _output_matrices(model, ids))

    def listen(self, layers: CapturedLayers) -> None:
        for accumulator in (self.preference, self.values):
            if accumulator is not None:
                layers.listen(accumulator.update)

    def tables(self, finished_pass: FinishedPass) -> dict[str, Rows]:
        tables: dict[str, Rows] = {}
        if self.preference is not None:
            self._refuse_distance_bias(self.preference.has_key_bias)
            tables["positional_preference"] = {**self.keys, **self.preference.compute()}
            tables["positional_summary"] = {**self.keys, **self.preference.summarise()}
        if self.values is not None:
            tables["value_attention"] = {**self.keys, **self.values.compute()}
        return tables

    def _refuse_distance_bias(self, is_biased: bool) -> None:
        if is_biased:
            raise UnsupportedModel(
                f"a positional logit curve is not possible for {self.model.spec}: its position scheme adds a "
                "distance bias (ALiBi) to the logits. Leave "
                "out distance: --parts weights,composition,values"
            )


def _output_matrices(model: Model, ids: Tensor) -> dict[int, Tensor]:
    """What each number of z adds to the residual stream, [H, D, dv] by layer index. The scheme is attached."""
    analysis, without = "value-weighted attention", "Leave out values: --parts weights,composition,distance"
    with capturing(model) as layers:
        decomposition = decompose_residual_stream(model, layers, ids, analysis, allow_scaled_layers=True)
    branches = [layer.attention_branch for layer in decomposition.layers if layer.attention_branch is not None]
    if any(branch.is_gated for branch in branches):
        raise UnsupportedModel(
            f"{analysis} is not possible for {model.name}: its heads' outputs are multiplied by a gate before the "
            f"projection. {without}"
        )
    heads = model.geometry.layer_heads
    return {branch.layer_index: branch.output_matrices(heads[branch.layer_index]) for branch in branches}


def attribution_tables(
    model: Model, ids: Tensor, attributions: Sequence[QKAttribution], weights: Sequence[float]
) -> dict[str, dict[str, Any]]:
    """Columns of `qk_rows`, `qk_components` and `qk_pairs` from `layer` on."""
    rows: list[tuple[Any, ...]] = []
    components: list[tuple[Any, ...]] = []
    pairs: list[tuple[Any, ...]] = []
    for result, weight in zip(attributions, weights, strict=True):
        row_and_key, names = result.row_and_key, result.components
        index = model.geometry.layer_numbers.index(row_and_key.layer)
        kv_group = row_and_key.head // model.geometry.heads_per_group(index)
        keys = (row_and_key.layer, row_and_key.head, kv_group, row_and_key.query, row_and_key.key)
        texts = (
            to_visible_line(model.tokenizer.decode(ids[max(0, end - TEXT_CONTEXT) : end + 1].tolist()))
            for end in (row_and_key.query, row_and_key.key)
        )
        rows.append((*keys, weight, result.logit, *texts))
        sides = (result.by_query_component(), result.by_key_component())
        for side, values in zip(SIDES, sides, strict=True):
            components += [(*keys, side, *entry) for entry in zip(names, values.tolist(), strict=True)]
        contributions, totals = result.contributions(), result.by_components()
        top = totals.abs().flatten().topk(min(TOP_PAIRS, totals.numel())).indices.tolist()
        of_pairs = contributions.flatten(0, 1)
        blocks = [(names[n // len(names)], names[n % len(names)], of_pairs[n]) for n in top]
        others = of_pairs[[n for n in range(len(of_pairs)) if n not in top]].sum(0)  # exactly 0 if there are none
        for query_name, key_name, block in [*blocks, (ALL_OTHERS, ALL_OTHERS, others)]:
            pairs += [(*keys, query_name, key_name, pair, value) for pair, value in enumerate(block.tolist())]
    return {
        table.name: dict(zip(table.arrow.names[3:], map(list, zip(*entries, strict=True)), strict=True))
        for table, entries in ((QK_ROWS, rows), (QK_COMPONENTS, components), (QK_PAIRS, pairs))
    }


def circuit_rows(embeddings: TokenEmbeddings) -> dict[str, Any]:
    """Columns of the table `head_circuits` from `layer` on."""
    model, blocks = embeddings.model, []
    vocabulary_maps: dict[bool, list[Tensor]] = {}
    for index, layer in enumerate(embeddings.weights.layers):
        reads_first_mlp = embeddings.uses_first_mlp and index > 0
        if reads_first_mlp not in vocabulary_maps:
            maps = [embeddings.vocabulary_map(index, centred=centred) for centred in (True, False)]
            vocabulary_maps[reads_first_mlp] = maps
        matrices = LayerCircuits.of_layer(layer)
        scores = [matrices.copying_scores(m).nan_to_num(0).clamp(-1, 1) for m in vocabulary_maps[reads_first_mlp]]
        blocks.append((*scores, matrices.ov_norms(), matrices.qk_norms()))
    columns = {
        name: torch.cat([block[n].cpu() for block in blocks]).numpy()
        for n, name in enumerate(("copying", "copying_uncentred", "ov_norm", "qk_norm"))
    }
    units = {str(name): column.to_numpy() for name, column in model_heads(model.geometry).items()}
    return {**units, **columns, "is_centred": True}


def ov_token_rows(embeddings: TokenEmbeddings, tokens: Mapping[str, int], top: int) -> dict[str, Any]:
    """Columns of the table `ov_tokens` from `layer` on."""
    model, rows = embeddings.model, []
    texts: dict[int, str] = {}
    for index, number in enumerate(model.geometry.layer_numbers):
        per_group = model.geometry.heads_per_group(index)
        for source, logits in zip(tokens, ov_logits(embeddings, index, torch.tensor([*tokens.values()])), strict=True):
            count = min(top, logits.shape[1])
            for effect, largest in (("boosted", True), ("suppressed", False)):
                values, ids = logits.topk(count, largest=largest)
                for head, (head_values, head_ids) in enumerate(zip(values.tolist(), ids.tolist(), strict=True)):
                    for rank, (value, token) in enumerate(zip(head_values, head_ids, strict=True)):
                        if token not in texts:
                            texts[token] = to_visible_line(model.tokenizer.decode([token]))
                        rows.append((number, head, head // per_group, source, effect, rank, token, texts[token], value))
    names = ("layer", "head", "kv_group", "source", "effect", "rank", "token", "text", "value")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def token_pair_rows(
    embeddings: TokenEmbeddings, pairs: Sequence[tuple[str, ...]], distances: Sequence[int]
) -> dict[str, Any]:
    """Columns of the table `token_pairs` from `layer` on."""
    model, blocks = embeddings.model, []
    queries, keys = (torch.tensor([find_token(model.tokenizer, words[side]) for words in pairs]) for side in (0, 1))
    ordered = sorted(distances)
    for index, number in enumerate(model.geometry.layer_numbers):
        logits = pair_logits(embeddings, queries, keys, torch.tensor(ordered), index).cpu().numpy()
        head, pair_index, distance, plane = np.indices(logits.shape).reshape(4, -1)
        blocks.append(
            {
                "layer": np.full(logits.size, number),
                "head": head,
                "kv_group": head // model.geometry.heads_per_group(index),
                "query_token": np.array([words[0] for words in pairs], dtype=object)[pair_index],
                "key_token": np.array([words[1] for words in pairs], dtype=object)[pair_index],
                "distance": np.array(ordered)[distance],
                "pair": plane,
                "contribution": logits.reshape(-1),
            }
        )
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def composition_tables(model: Model, weights: ModelWeights) -> dict[str, dict[str, Any]]:
    """Columns of the tables `head_composition` from `sender_layer` on, and `composition_null` from `input` on.

    Raises UnsupportedModel for a single layer.
    """
    geometry, heads_of_model, blocks = model.geometry, model_heads(model.geometry), []
    factors_of_senders: list[Tensor] = []
    null = CompositionNull()
    baselines: dict[tuple[int, ...], float] = {}
    for index, layer in enumerate(weights.layers):
        matrices = LayerCircuits.of_layer(layer)
        weights_by_input = {
            "q": (matrices.query, matrices.key),
            "k": (matrices.key, matrices.query),
            "v": (matrices.value, matrices.output.transpose(1, 2)),
        }
        senders = heads_of_model[: sum(geometry.layer_heads[:index])]
        for kind, (input_weight, partner_weight) in weights_by_input.items() if index else ():
            factors = receiver_factors(input_weight, partner_weight)
            heads, count = len(input_weight), len(senders)
            scores, expected = (np.empty((heads, count), np.float32) for _ in range(2))
            for start, sender in zip(np.cumsum([0, *map(len, factors_of_senders)]), factors_of_senders, strict=False):
                part, sender_here = slice(start, start + len(sender)), sender.to(factors.device)
                scores[:, part] = composition_scores(factors, sender_here).cpu().numpy()
                null.update(kind, factors, sender_here)
                shape = (input_weight.shape[1], sender.shape[2], input_weight.shape[2])
                if shape not in baselines:
                    baselines[shape] = random_composition(*shape, seed=0)
                expected[:, part] = baselines[shape]
            head = np.repeat(np.arange(heads, dtype=np.int16), count)
            blocks.append(
                {
                    "sender_layer": np.tile(senders["layer"].astype(np.int16), heads),
                    "sender_head": np.tile(senders["head"].astype(np.int16), heads),
                    "layer": np.full(len(head), geometry.layer_numbers[index], np.int16),
                    "head": head,
                    "kv_group": head // np.int16(geometry.heads_per_group(index)),
                    "input": np.full(len(head), kind, dtype=object),
                    "score": np.round(scores.reshape(-1) / SCORE_STEP) * np.float32(SCORE_STEP),
                    "baseline": expected.reshape(-1),
                }
            )
        factors_of_senders.append(sender_factors(matrices.value, matrices.output))
    if not blocks:
        raise UnsupportedModel(
            f"composition is not possible for {model.name}: it has one layer. Leave it out: --parts "
            "weights,distance,values"
        )
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    return {"head_composition": columns, "composition_null": null.compute()}


def find_token(tokenizer: Any, word: str) -> int:
    """The token of a word: with a leading space if that is one token, else alone. Raises BadInput for other words."""
    unknown = tokenizer.unk_token_id
    for text in (f" {word}", word) if not word.startswith(" ") else (word,):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == 1 and ids[0] != unknown:
            return int(ids[0])
    if unknown is not None and ids == [unknown]:
        raise BadInput(f"'{word}' is not a word of the tokenizer. Use a word that is one token")
    raise BadInput(f"'{word}' is {len(ids)} tokens. Use a word that is one token")
