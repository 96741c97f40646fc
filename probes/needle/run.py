"""Needle-in-a-Haystack: which heads copy a hidden fact while the model answers a question about it.

After Wu et al. 2024, "Retrieval Head Mechanistically Explains Long-Context Factuality". Prompts with a common prefix
are consecutive, so the model only reads the tokens after it.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import pandas as pd

from headscope.decomposition.residual_decomposition import ResidualDecomposition
from headscope.errors import BadInput
from headscope.forward.prefix_cache import PrefixCachedGenerator
from headscope.positions.model import Model
from headscope.prompts.haystack import Haystack, NeedlePrompt, NeedlePromptBuilder
from headscope.prompts.needle_grid import CONTROL, NeedleGrid, NeedleTrial
from headscope.prompts.needles import read_needles
from headscope.prompts.shakespeare import DEFAULT_SOURCE, expand_source
from headscope.runs.arrow import Rows
from headscope.runs.column_metadata import exceeds
from headscope.scores import match_heads, model_heads, refuse_other_model
from headscope.scores import read as read_scores
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from headscope.study.named_heads import StudyAblations
from probes.needle import ablation
from probes.needle import generation as rows_of
from probes.needle.ablation import NEEDLE_HALVES, AblationWork, needle_half
from probes.needle.declaration import NeedleOptions
from probes.needle.generation import (
    TrialAnswer,
    TrialPrompt,
    answer_text,
    answer_trials,
    decompose_residual,
    generate_answers,
    rouge1_recall,
)
from probes.needle.scores import rank_heads

log = logging.getLogger("headscope")

SUCCESS_RECALL = 0.5
"""ROUGE-1 recall above which a trial succeeds."""


class NeedleRunner:
    """Cells: one per model, haystack, needle, context length and depth; a control without the needle for all depths;
    and one per ablation and half of the needles."""

    def __init__(self, options: NeedleOptions, context: StudyContext):
        self.options, self.context = options, context
        self.needles = read_needles(options.file, options.needles, options.kind)
        if options.mode == "wu" and (other := [needle.name for needle in self.needles if needle.is_indirect]):
            raise BadInput(
                f"needle '{other[0]}' has a paraphrased question (cue), which mode wu does not support. Use mode strict"
            )
        if options.ablate_top and options.heads is None and len(self.needles) < NEEDLE_HALVES:
            raise BadInput("ablate_top ranks heads on half of the needles. Use at least 2 needles")
        context.record_input("needles", (text for needle in self.needles for text in astuple(needle)))
        if options.haystacks and len(options.haystacks) != len(self.needles):
            raise BadInput(
                f"'haystacks' has {len(options.haystacks)} text sources for {len(self.needles)} needles. Give one per "
                "needle"
            )
        if options.haystacks and context.study.texts.source != expand_source(DEFAULT_SOURCE):
            raise BadInput("'text' has no effect beside 'haystacks'. Remove one of them")
        self.head_scores = None if options.heads is None else read_scores(options.heads)
        if self.head_scores is not None:
            context.record_input("heads", [self.head_scores.table.to_csv(index=False)])
        self.grid = NeedleGrid(
            self.needles,
            options.grid_lengths,
            options.grid_depths,
            options.seeds,
            context.study.texts.source,
            context.seed,
            options.template,
            options.mode,
            options.haystacks,
        )
        self._cached_reader: tuple[str, PrefixCachedGenerator] | None = None
        self._cached_decomposition: tuple[str, ResidualDecomposition] | None = None
        self._rankings: dict[tuple[str, int], pd.DataFrame | None] = {}
        self._ablations = StudyAblations(context)
        self._sorted_trials: dict[str, list[NeedleTrial]] = {}
        self._answers: dict[tuple[str, NeedleTrial], TrialAnswer] = {}

    def cells(self) -> list[Cell]:
        cells = []
        for label in self.context.labels:
            previous: NeedleTrial | None = None
            for trial in self._trials(label):
                shared = (
                    0 if previous is None or previous.haystack != trial.haystack else previous.shared_haystack_tokens
                )
                cost = pass_cost(trial.length) - pass_cost(shared)
                cells.append(Cell(f"{label}: {self._describe_trial(trial)}", label, cost, trial))
                previous = trial
            cells += self._ablation_cells(label, cells)
        return cells

    def _ablation_cells(self, label: str, trial_cells: Sequence[Cell]) -> list[Cell]:
        """The ablation cells of one model; `trial_cells` are all its trials."""
        if not self.options.ablate_top:
            return []
        for kind in self._ablations.check(self.options.ablation, label):
            if getattr(kind, "needs_whole_text", False):
                raise BadInput(
                    f"ablation '{kind.name}' needs the whole text in one pass, and the model generates token by token. "
                    "Use another rule"
                )
        geometry = self.context.model(label).geometry
        head_count, owner = sum(geometry.layer_heads), f"model '{label}'"
        if self.head_scores is not None:
            head_count, owner = len(self._match_file_heads(label)), f"'{self.head_scores.source}'"
        if max(self.options.ablate_top) > head_count:
            raise BadInput(
                f"ablate_top {max(self.options.ablate_top)}: {owner} has {head_count} heads. Use a smaller number"
            )
        model_cells = [cell for cell in trial_cells if cell.model == label]
        cells = []
        for kind in self.options.ablation:
            for size in sorted(set(self.options.ablate_top)):
                for draw in range(1 + self.options.draws):
                    for half in range(NEEDLE_HALVES):
                        tested = [cell for cell in model_cells if needle_half(cell.work.needle) == half]
                        ranking = [cell for cell in model_cells if needle_half(cell.work.needle) != half]
                        if self.head_scores is not None:
                            ranking = []
                        if not tested:
                            continue  # a single needle has one half
                        prerequisites = tuple(cell.id for cell in ranking)
                        heads = f"the top {size} heads" if draw == 0 else f"{size} heads of draw {draw}"
                        name = f"{label}: {kind} of {heads}, half {half} of the needles"
                        cost = sum(cell.cost for cell in tested if cell.work.mode != CONTROL)
                        cells.append(Cell(name, label, cost, AblationWork(kind, size, draw, half, prerequisites)))
        return cells

    def compute_rows(self, cell: Cell[NeedleTrial | AblationWork], model: Model) -> Mapping[str, Rows]:
        if isinstance(cell.work, AblationWork):
            return self._ablation_rows(cell.model, cell.work, model)
        trial = cell.work
        prompter, prompts = self._prepare(cell.model)[1][trial.needle], self._prompts(cell.model, trial)
        answer = self._answer(cell.model, trial, model)
        keys = self._key_columns(cell.model, trial)
        rows: dict[str, Rows] = {
            "needles": {
                **keys,
                "depth": list(trial.depths),
                "prompt_tokens": len(prompts[0].ids),
                "achieved_depth": [prompt.depth for prompt in prompts],
                "span_start": [prompt.start for prompt in prompts],
                "span_end": [prompt.end for prompt in prompts],
                "answer": answer.text,
                "recall": answer.recall,
                "success": exceeds(answer.recall, SUCCESS_RECALL),
                "steps": len(answer.step_texts),
            },
            "retrieval": {**keys, **rows_of.retrieval_columns(answer.copies, model.geometry, trial.depths)},
        }
        if trial.mode != CONTROL:
            trial_keys = {**keys, "depth": trial.depths[0]}
            rows |= {
                "needle_tokens": rows_of.needle_tokens_row(prompts[0], prompter, trial_keys),
                "needle_prompts": rows_of.prompt_row(prompts[0], prompter, trial_keys),
                **rows_of.answer_step_rows(answer, model.geometry, trial_keys),
            }
        if answer.attribution is not None:
            rows["needle_attribution"] = {
                **keys,
                **rows_of.attribution_columns(answer.attribution, model.geometry, trial.depths),
            }
        return rows

    def _answer(self, label: str, trial: NeedleTrial, model: Model) -> TrialAnswer:
        """The answer to a trial, generated together with those to the next trials of its length, which are kept."""
        if (label, trial) not in self._answers:
            trials, reader = self._trials(label), self._get_reader(label, model)
            batch = [trial]
            if (most := reader.batch_size(trial.length)) > 1:
                later = trials[trials.index(trial) :]
                batch = self._batches(label, [*self._waiting(label, later, trial.length)], most)[0]
            prompts = [self._trial_prompt(label, member) for member in batch]
            decomposition = None
            if self.options.attribution:
                decomposition = self._get_decomposition(label, model, prompts[0].prompts[0])
            answers = answer_trials(reader, prompts, decomposition)
            kept = {key: answer for key, answer in self._answers.items() if key[0] == label}
            self._answers = kept | {(label, member): answer for member, answer in zip(batch, answers, strict=True)}
            self.context.cells_ahead = len(batch) - 1
        return self._answers.pop((label, trial))

    def _waiting(self, label: str, trials: Sequence[NeedleTrial], length: int) -> Iterator[NeedleTrial]:
        """The trials of this length without a kept answer."""
        return (trial for trial in trials if trial.length == length and (label, trial) not in self._answers)

    def _batches(self, label: str, trials: Sequence[NeedleTrial], most: int) -> list[list[NeedleTrial]]:
        """Batches of at most `most` trials whose prompts have one length; single trials keep their order."""
        if most == 1:
            return [[trial] for trial in trials]
        by_tokens = defaultdict[int, list[NeedleTrial]](list)
        for trial in trials:
            by_tokens[len(self._prompts(label, trial)[0].ids)].append(trial)
        return [members[at : at + most] for members in by_tokens.values() for at in range(0, len(members), most)]

    def _trial_prompt(self, label: str, trial: NeedleTrial) -> TrialPrompt:
        return TrialPrompt(self._prompts(label, trial), self._prepare(label)[1][trial.needle], trial.mode)

    def _ablation_rows(self, label: str, work: AblationWork, model: Model) -> Mapping[str, Rows]:
        """Every trial of one half of the needles with a set of heads ablated.

        No rows if no successful trial ranks heads, or for a random set if the top heads have no control.
        """
        ranking = self._head_ranking(label, work)
        if ranking is None:
            log.warning("no successful trial ranks the heads of %s; its heads are not ablated", label)
            return {}
        heads = ablation.select_heads(ranking, work, self.context.seed)
        if heads.empty:
            if work.draw == 1:
                log.warning(
                    "%s, half %d of the needles: the top %d heads have no random control: %s. Use a smaller ablate_top",
                    *(label, work.half, work.size, ablation.explain_missing_control(ranking, work.size)),
                )
            return {}
        units = ablation.heads_to_units(heads, model.geometry)
        prompters = self._prepare(label)[1]
        kind = self._ablations.kind(work.ablation, label, model)
        self.drop_cached_prefix()
        reader = PrefixCachedGenerator(model)
        trials = [
            trial for trial in self._trials(label) if trial.mode != CONTROL and needle_half(trial.needle) == work.half
        ]
        answers: dict[NeedleTrial, str] = {}
        with ablation.heads_ablated(model, units, kind):
            for batch in self._batches(label, trials, reader.batch_size(max(self.options.grid_lengths))):
                prompts = [self._trial_prompt(label, trial) for trial in batch]
                for trial, prompt, (_, tokens) in zip(batch, prompts, generate_answers(reader, prompts), strict=True):
                    answers[trial] = answer_text(prompt.builder, tokens)
        rows = []
        for trial in trials:
            recall = rouge1_recall(prompters[trial.needle].scored_text, answers[trial])
            outcome = {"answer": answers[trial], "recall": recall, "success": exceeds(recall, SUCCESS_RECALL)}
            rows.append({**self._key_columns(label, trial), "depth": trial.depths[0], **outcome})
        groups = [unit.kv_group for unit in ablation.heads_to_units(heads, model.geometry)]
        ablated = heads.assign(model=label, half=work.half, kv_group=groups)
        return {
            name: frame.assign(ablation=work.ablation, size=work.size, draw=work.draw)
            for name, frame in (("needle_ablation", pd.DataFrame(rows)), ("needle_ablated_heads", ablated))
        }

    def _match_file_heads(self, label: str) -> pd.DataFrame:
        """Columns layer, head, kv_group and score of the heads in the given file. Raises BadInput for another model."""
        assert self.head_scores is not None
        model = self.context.model(label)
        if refuse_other_model(self.head_scores, model.identity, label, model.name, self.options.weights):
            digest = self.head_scores.model_digests.label or self.head_scores.model
            self.context.record_other_weights(label, self.head_scores.source, digest)
        return match_heads(self.head_scores, model.geometry, label)

    def _head_ranking(self, label: str, work: AblationWork) -> pd.DataFrame | None:
        """The heads of the given file, or those ranked over the successful trials of the other half, from stored cells.

        None if there are no such trials. Heads that a file does not name come last, with a score of 0.
        """
        if self.head_scores is not None:
            heads = model_heads(self.context.model(label).geometry)
            ranked = heads.merge(self._match_file_heads(label), how="left").drop(columns="kv_group")
            return ranked.sort_values("score", ascending=False, kind="stable", ignore_index=True).fillna({"score": 0.0})
        if (label, work.half) not in self._rankings:
            name = "retrieval" if self.options.rank_by == "copies" else "needle_attribution"
            trials, scores = (
                pd.concat([self.context.read_stored(f"needle/{cell}", table) for cell in work.prerequisites])
                for table in ("needles", name)
            )
            self._rankings[label, work.half] = rank_heads(trials, scores)
        return self._rankings[label, work.half]

    def _key_columns(self, label: str, trial: NeedleTrial) -> dict[str, Any]:
        """The key columns of a trial without its depth."""
        return {
            "model": label,
            "mode": trial.mode,
            "needle": self.needles[trial.needle].name,
            "context_length": trial.length,
            "doc": self._prepare(label)[0][trial.haystack].name,
            "seed": self.context.seed + trial.haystack % self.options.seeds,
        }

    def drop_cached_prefix(self) -> None:
        """Drop the cached prefix and the kept answers: the next prompt is read from its start."""
        self._cached_reader, self._answers = None, {}

    def _trials(self, label: str) -> list[NeedleTrial]:
        if label not in self._sorted_trials:
            self._prepare(label)
            self._sorted_trials[label] = self.grid.trials(self.context.tokenizer(label))
        return self._sorted_trials[label]

    def _prompts(self, label: str, trial: NeedleTrial) -> list[NeedlePrompt]:
        return self.grid.prompts(self.context.tokenizer(label), trial)

    def _prepare(self, label: str) -> tuple[list[Haystack], list[NeedlePromptBuilder]]:
        """Haystacks and needles in this model's tokens; models with one tokenizer share them."""
        stacks, builders = self.grid.prepare(self.context.tokenizer(label))
        name = f"haystacks of '{label}'"
        if name not in self.context.input_digests[""]:  # for each model, whichever prepared the shared ones
            parts = (part for stack in stacks for part in (stack.name, stack.special_prefix, stack.ids))
            self.context.record_input(name, parts)
        return stacks, builders

    def _get_reader(self, label: str, model: Model) -> PrefixCachedGenerator:
        if self._cached_reader is None or self._cached_reader[0] != label:
            self._cached_reader = None  # its cache goes before the next one grows
            self._cached_reader = (label, PrefixCachedGenerator(model))
            if not self._cached_reader[1].shares_prefixes:
                log.warning(
                    "the queries of %s depend on the total length; every answer step reads the whole prompt again",
                    label,
                )
        return self._cached_reader[1]

    def _get_decomposition(self, label: str, model: Model, prompt: NeedlePrompt) -> ResidualDecomposition:
        """The decomposition of the model's logits, computed once per model."""
        if self._cached_decomposition is None or self._cached_decomposition[0] != label:
            self._cached_decomposition = (label, decompose_residual(model, prompt.ids))
        return self._cached_decomposition[1]

    def _describe_trial(self, trial: NeedleTrial) -> str:
        position = f"depth {trial.depths[0]:.4f}" if trial.mode != CONTROL else "without the needle"
        needle = self.needles[trial.needle].name
        seed = self.context.seed + trial.haystack % self.options.seeds
        return f"needle {needle}, seed {seed}, {trial.length} tokens, {position}"
