"""Reads: a forward pass over a document or a prompt, heard by `measures.reads`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headscope import user_input
from headscope.attention.record import Attention
from headscope.errors import BadInput, Missing
from headscope.forward.capture import capturing
from headscope.forward.chunked_pass import chunk_size, hidden_in_chunks
from headscope.forward.logits import finite_hidden
from headscope.measures.top_keys import Reads, stratified
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts import texts
from headscope.prompts.texts import TokenDocument
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import Materials
from headscope.study.digests import of_tokenizer
from probes.patterns.options import MOST_ROWS, ReadsConfig
from probes.patterns.token_text import pieces


@dataclass(frozen=True)
class _Task:
    length: int
    doc: int
    tokenizer: str
    tells: bool
    """Whether this is the cell that stores the document's tokens."""


class ReadsSection:
    """Cells: each (model, context length, document), or each model with the prompt.

    A document over which another section passes in this process, too, is read in that pass, and its cell stores what
    was heard then: the same bytes, wherever a run was resumed.
    """

    def __init__(self, config: ReadsConfig, materials: Materials):
        self.config, self.materials = config, materials
        self._heard: dict[tuple[str, int, int], Reads] = {}
        self._prompt = _prompt(config)
        if self._prompt is None:
            materials.beside.append(self.listener)
        else:
            materials.uses("prompt", self._prompt)

    def cells(self) -> list[Cell]:
        cells, told = [], set()
        for label in self.materials.labels:
            documents = self._documents(label)
            longest = len(documents[0].ids)
            tokenizer = of_tokenizer(self.materials.tokenizer(label))
            for length in [longest] if self._prompt is not None else self.config.lengths:
                for doc, document in enumerate(documents):
                    tokens = sha256(f"{tokenizer} {document.digest}".encode()).hexdigest()[:12]
                    new = length == longest and (tokens, doc) not in told
                    if new:
                        told.add((tokens, doc))
                    task = _Task(length, doc, tokens, new)
                    cells.append(Cell(f"{label}: {length} tokens, {document.name}", label, pass_cost(length), task))
        return cells

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        task, document = cell.task, self._documents(cell.model)[cell.task.doc]
        found = self._heard.pop((cell.model, task.length, task.doc), None)
        if found is None:
            found = read(
                model, torch.tensor(document.ids[: task.length]), self._rows(task.length, task.doc), self.config.keys
            )
        keys = {"model": cell.model, "context_length": task.length, "doc": document.name}
        stored: dict[str, Rows] = {
            "passages": {**keys, "tokenizer": [task.tokenizer], "rows": len(found.chosen)},
            "reads": {**keys, **found.compute()},
        }
        if len((far := found.far())["query"]):
            stored["far_reads"] = {**keys, **far}
        if task.tells:
            stored["pieces"] = _told(self.materials.tokenizer(cell.model), task.tokenizer, document)
        return stored

    def listener(self, label: str, ids: Sequence[int], model: Model) -> Callable[[Attention], None] | None:
        """Who hears another section's pass over these tokens; None where no cell reads them."""
        length = len(ids)
        for doc, document in enumerate(self._documents(label)) if length in self.config.lengths else ():
            if document.ids[:length] == ids:
                found = Reads(model.geometry, self._rows(length, doc), self.config.keys)
                self._heard[label, length, doc] = found
                return found.update
        return None

    def _rows(self, length: int, doc: int) -> Tensor:
        count = MOST_ROWS if self._prompt is not None else self.config.rows
        return stratified(length, count, self.materials.seed + doc)

    def _documents(self, label: str) -> list[TokenDocument]:
        """The prompt, or the documents of every length, as long as the longest."""
        if self._prompt is None:
            return self.materials.documents(label, max(self.config.lengths))
        name, text = self._prompt
        ids = texts.first_tokens(text, self.materials.tokenizer(label), MOST_ROWS + 1)
        if len(ids) < 2:
            raise BadInput(f"the prompt holds {len(ids)} token{'s' if not ids else ''}: give a text of 2 or more")
        if len(ids) > MOST_ROWS:
            raise BadInput(
                f"the prompt holds more than {MOST_ROWS:,} tokens, too many to keep every row: give a shorter one, or "
                "sample rows of it with --text file:PATH and --length"
            )
        return [TokenDocument(name, ids, sha256(text.encode()).hexdigest())]


def read(model: Model, ids: Tensor, rows: Tensor, most: int) -> Reads:
    """The top keys of these rows of ids [L] in every head, under the model's scheme."""
    reads = Reads(model.geometry, rows, most)
    with attached(model), capturing(model) as layers, evaluating(model):
        ids = ids.to(model.device)[None]
        size = chunk_size(model, ids)
        layers.listen(reads.update)
        finite_hidden(model, ids) if size is None else hidden_in_chunks(model, ids, size)
    return reads


def _prompt(config: ReadsConfig) -> tuple[str, str] | None:
    """Name and text of the prompt, if there is one. Raises BadInput for a blank one, Missing without its file."""
    if config.prompt is not None:
        name, text = "prompt", config.prompt
    elif config.prompt_file is not None:
        file = user_input.path(config.prompt_file, "prompt file")
        if not file.is_file():
            raise Missing(f"no prompt file {user_input.shown(config.prompt_file)} (from {Path.cwd()}); check the path")
        name, text = f"prompt/{file.name}", next(texts.read(f"file:{file}")).text
    else:
        return None
    if not text.strip():
        raise BadInput(f"{'the prompt' if name == 'prompt' else f'{config.prompt_file}'} holds no text: give some")
    return name, text


def _told(tokenizer: Any, name: str, document: TokenDocument) -> Rows:
    """Rows of `pieces`."""
    told, special = pieces(tokenizer, document.ids)
    return {
        "tokenizer": name,
        "doc": document.name,
        "position": list(range(len(document.ids))),
        "token": document.ids,
        "piece": told,
        "special": special,
    }
