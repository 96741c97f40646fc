"""Write the scores of heads in the file formats of tools that compress the KV cache, and for tables and papers.

A format that has no field for where the scores come from gets a second file, which ends in headscope.json: score,
model, digest of the weights, and how query heads were reduced to KV groups.
"""

import io
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from headscope.base.output_files import Output
from headscope.base.public_functions import check_argument
from headscope.errors import BadInput
from headscope.runs.run_tables import RunTables
from headscope.runs.summary import model_identity
from headscope.scores.head_scores import HeadScores, Matrix, Reduction, choose_model
from headscope.scores.minference import best_patterns
from headscope.scores.rotary_export import longrope_parameters, rotary_pair_ranks

Files = Mapping[str, bytes]
"""Content by file name; the name "" is the exported file itself, other names are files in an exported folder."""


EXPORT = Output()


@dataclass(frozen=True)
class ExportOptions:
    """Options of formats.

    `reduction`: how query heads that share a key head are reduced to one score. `sink`, `recent`: tokens that a
    streaming head keeps at the start and at the end. `share`: share of KV groups, 0 to 1, that keep the whole context.
    `top`: the number of heads.
    """

    reduction: Reduction = "max"
    sink: int = 64
    recent: int = 256
    share: float = 0.5
    top: int = 16

    def __post_init__(self) -> None:
        for option in fields(self):
            object.__setattr__(self, option.name, check_argument(option.type, getattr(self, option.name), option.name))
        if self.sink < 0 or self.recent < 0 or self.sink + self.recent == 0:
            raise BadInput(
                f"sink={self.sink} and recent={self.recent} leave a streaming head no token. Give at least one token"
            )
        if not 0 <= self.share <= 1:
            raise BadInput(f"share={self.share} is not a share of KV groups. Use a number from 0 to 1")
        if self.top < 1:
            raise BadInput(f"top={self.top} is not a number of heads. Use at least 1")


@dataclass(frozen=True)
class Format:
    """A file format: what it is, the options it reads, and the function that makes its files."""

    meaning: str
    write: Callable[[RunTables, str, str | None, ExportOptions], Files]
    options: tuple[str, ...] = ()
    needs_score: bool = True


def export_scores(
    run: RunTables,
    file_format: str,
    out: Path | str,
    score: str | None = None,
    model: str | None = None,
    **options: Any,
) -> Path:
    """Write a score of all heads of one model to `out`, which must not exist yet, and return it.

    `score` is a column of `run.heads`, for csv also several with commas between them; for mha2mla a column of
    `run.pairs`; longrope needs none. `options` are fields
    of `ExportOptions`. Raises BadInput for what the run or the format lacks, CannotWrite if `out` cannot be written;
    nothing is written then.
    """
    if file_format not in FORMATS:
        raise BadInput(f"no export format '{file_format}'. Use one of: {', '.join(FORMATS)}")
    chosen = FORMATS[file_format]
    if unused := sorted({*options} - {*chosen.options}):
        known = f"it has {', '.join(chosen.options)}" if chosen.options else "it has no options"
        raise BadInput(f"format {file_format} has no option '{unused[0]}'; {known}. Leave it out")
    if chosen.needs_score != (score is not None):
        problem = "a score. Give --score COLUMN" if chosen.needs_score else f"no score: '{score}'. Leave out --score"
        raise BadInput(f"format {file_format} needs {problem}")
    path = EXPORT.check(out)
    EXPORT.check(_side_file(path))
    _write(path, chosen.write(run, score or "", model, ExportOptions(**options)))
    return path


def _write(path: Path, files: Files) -> None:
    """Write all files, or nothing if one of them fails."""
    with ExitStack() as drafts:
        draft = drafts.enter_context(EXPORT.draft(path))
        if "" not in files:
            draft.mkdir()
            for name, content in files.items():
                (draft / name).write_bytes(content)
            return
        if "headscope.json" in files:
            drafts.enter_context(EXPORT.draft(_side_file(path))).write_bytes(files["headscope.json"])
        draft.write_bytes(files[""])


def _side_file(path: Path) -> Path:
    """The file beside an exported one that says where it comes from."""
    return path.with_name(f"{path.name}.headscope.json")


def _origin(scores: HeadScores, **facts: object) -> bytes:
    """Where the scores come from, as JSON."""
    names = {"score": scores.name, "model": scores.model, "run": scores.source}
    return _json({**names, **scores.model_digests.to_record(), **facts})


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _json_line(value: object) -> bytes:
    """JSON on one line: Retrieval_Head and HeadKV read only the first line of a file."""
    return (json.dumps(value) + "\n").encode()


def _every_layer(run: RunTables, score: str, model: str | None) -> HeadScores:
    """The scores, for a format whose rows are the layers 0, 1, ... Raises BadInput if a layer has no scores."""
    scores = HeadScores.from_run(run, score, model)
    layers = {int(layer) for layer in scores.table["layer"]}
    if missing := {*range(max(layers))} - layers:
        raise BadInput(
            f"layer {min(missing)} of {scores.model} has no '{score}', and this format needs a row for every layer. "
            "Use csv or json"
        )
    return scores


def _unit_interval(values: Matrix) -> tuple[Matrix, str]:
    """Values from 0 to 1 as they are, others as ranks from 0 to 1, and which of the two."""
    return (values, "none") if values.min() >= 0 and values.max() <= 1 else _ranks(values)


def _shares(values: Matrix) -> tuple[Matrix, str]:
    """Values with a positive sum and none below 0 as they are, others as ranks, and which of the two.

    HeadKV gives each head its share of the sum.
    """
    return (values, "none") if values.min() >= 0 and values.sum() > 0 else _ranks(values)


def _ranks(values: Matrix) -> tuple[Matrix, str]:
    ranks = values.ravel().argsort(kind="stable").argsort(kind="stable").reshape(values.shape)
    return ranks / max(1, values.size - 1), "rank, 0 for the lowest to 1 for the highest score"


def _duo(run: RunTables, score: str, model: str | None, options: ExportOptions) -> Files:
    scores = _every_layer(run, score, model)
    values, transform = _unit_interval(scores.by_group(options.reduction))
    if 1 in values.shape:
        layers, groups = values.shape
        raise BadInput(
            f"{scores.model} has scores of {layers} layers of {groups} KV heads: DuoAttention and kvpress read the "
            "file of a single row or column as a list. Use headkv, rtp-llm or csv"
        )
    rows = "\n".join("\t".join(f"{value:.6f}" for value in row) for row in values)
    return {
        "full_attention_heads.tsv": f"{rows}\n".encode(),
        "config.json": _json({"sink_size": options.sink, "recent_size": options.recent}),
        "headscope.json": _origin(scores, reduction=options.reduction, transform=transform),
    }


def _retrieval_head(run: RunTables, score: str, model: str | None, options: ExportOptions) -> Files:
    scores = HeadScores.from_run(run, score, model)
    ranking = scores.ranking
    content = {f"{layer}-{head}": [value] for (layer, head), value in zip(ranking, ranking.weights or (), strict=True)}
    return {"": _json_line(content), "headscope.json": _origin(scores)}


def _headkv(run: RunTables, score: str, model: str | None, options: ExportOptions) -> Files:
    scores = _every_layer(run, score, model)
    values, transform = _shares(scores.by_head())
    content = {f"{layer}-{head}": [float(value)] for (layer, head), value in np.ndenumerate(values)}
    return {"": _json_line(content), "headscope.json": _origin(scores, transform=transform)}


def _qrhead(run: RunTables, score: str, model: str | None, options: ExportOptions) -> Files:
    scores = HeadScores.from_run(run, score, model)
    checkpoint = next(entry["checkpoint"] for entry in run.manifest["models"] if entry["label"] == scores.model)
    heads = [f"{layer}-{head}" for layer, head in scores.ranking.heads[: options.top]]
    content = {
        "attn_head_set": ",".join(heads),
        "model_base_class": Path(checkpoint).name,
        "model_name_or_path": checkpoint,
    }
    return {"": yaml.safe_dump(content, sort_keys=False).encode(), "headscope.json": _origin(scores, top=len(heads))}


def _rtp_llm(run: RunTables, score: str, model: str | None, options: ExportOptions) -> Files:
    scores = HeadScores.from_run(run, score, model)
    groups = scores.by_group(options.reduction)
    heads_per_group = scores.by_head().shape[1] // groups.shape[1]
    kept = np.zeros(groups.size, dtype=bool)
    kept[(-groups.ravel()).argsort(kind="stable")[: round(options.share * groups.size)]] = True
    layers = [str(layer) for layer in scores.table["layer"].unique()]
    flags = kept.reshape(groups.shape).repeat(heads_per_group, axis=1).astype(int).tolist()
    window = {"sink_token_num": options.sink, "swa_token_num": options.recent}
    config = {**window, "seqlen_threshold": options.sink + options.recent, **dict(zip(layers, flags, strict=True))}
    facts = {"reduction": options.reduction, "share": options.share}
    return {"": _json({"headwise_config": config}), "headscope.json": _origin(scores, **facts)}


def _lukv(run: RunTables, score: str, model: str | None, options: ExportOptions) -> Files:
    scores = _every_layer(run, score, model)
    groups = scores.by_group(options.reduction)
    rank = groups.ravel().argsort(kind="stable").argsort(kind="stable").reshape(groups.shape)
    compressions = np.arange(1, 100)[:, None, None] / 100
    ratios = np.clip(compressions * groups.size - rank, 0, 1)  # the lowest groups are emptied first
    buffer = io.BytesIO()
    np.save(buffer, ratios.astype(np.float32), allow_pickle=False)
    rule = "KV groups are pruned wholly in order of score, lowest first, until the mean is the compression ratio"
    return {"": buffer.getvalue(), "headscope.json": _origin(scores, reduction=options.reduction, rule=rule)}


def _mha2mla(run: RunTables, score: str, model: str | None, options: ExportOptions) -> Files:
    ranks, facts = rotary_pair_ranks(run, score, model)
    import torch  # the format is torch's own

    buffer = io.BytesIO()
    torch.save(torch.from_numpy(np.concatenate([ranks, ranks], axis=-1)), buffer)
    return {"": buffer.getvalue(), "headscope.json": _json(facts)}


def _longrope(run: RunTables, score: str, model: str | None, options: ExportOptions) -> Files:
    parameters, facts = longrope_parameters(run, model)
    return {"": _json({"rope_parameters": parameters}), "headscope.json": _json(facts)}


def _minference(run: RunTables, score: str, model: str | None, options: ExportOptions) -> Files:
    label = choose_model(run, model)
    facts = {"score": "mean recall of sampled rows", "model": label, "run": run.name}
    digests = model_identity(run, label).weights.to_record()
    return {"": _json_line(best_patterns(run, label)), "headscope.json": _json({**facts, **digests})}


def _csv(run: RunTables, score: str, model: str | None, options: ExportOptions) -> Files:
    columns = [HeadScores.from_run(run, name.strip(), model) for name in score.split(",")]
    names = [scores.name for scores in columns]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise BadInput(f"score '{min(repeated)}' is given twice: {score}. Give every score once")
    table = pd.concat(
        [
            columns[0].table[["layer", "head", "kv_group"]],
            *(scores.table["score"].rename(scores.name) for scores in columns),
        ],
        axis=1,
    )
    return {
        "": table.to_csv(index=False).encode(),
        "headscope.json": _origin(replace(columns[0], name=", ".join(names))),
    }


def _latex(run: RunTables, score: str, model: str | None, options: ExportOptions) -> Files:
    scores = HeadScores.from_run(run, score, model)
    ranking = scores.ranking
    top = [*zip(ranking, ranking.weights or (), strict=True)][: options.top]
    rows = [f"{layer} & {head} & {value:.4g} \\\\" for (layer, head), value in top]
    name = scores.name.replace("_", r"\_")
    lines = [
        f"% {scores.name} of {scores.model}, run {scores.source}, weights {scores.model_digests.label}",
        r"\begin{tabular}{rrr}",
        r"\hline",
        f"layer & head & {name} \\\\",
        r"\hline",
        *rows,
        r"\hline",
        r"\end{tabular}",
    ]
    return {"": ("\n".join(lines) + "\n").encode()}


def _head_set(run: RunTables, score: str, model: str | None, options: ExportOptions) -> Files:
    ranking = HeadScores.from_run(run, score, model).ranking.to_dict()
    return {"": _json(ranking | {key: ranking[key][: options.top] for key in ("heads", "weights")})}  # type: ignore[index]


FORMATS: Mapping[str, Format] = {
    "duo": Format(
        "DuoAttention and kvpress: a folder with full_attention_heads.tsv [layers, KV heads] and config.json",
        _duo,
        ("reduction", "sink", "recent"),
    ),
    "retrieval-head": Format(
        "Retrieval_Head: one line of JSON, layer-head to a list of scores, highest first", _retrieval_head
    ),
    "headkv": Format("HeadKV: the same, in order of layer and head; ranks if a score is negative", _headkv),
    "qrhead": Format("QRHead: YAML with the best heads", _qrhead, ("top",)),
    "rtp-llm": Format(
        "RTP-LLM: JSON headwise_config with 1 for each query head that keeps the whole context",
        _rtp_llm,
        ("reduction", "share", "sink", "recent"),
    ),
    "lukv": Format("kvpress LUKVPress: npy [99, layers, KV heads] of prune ratios", _lukv, ("reduction",)),
    "mha2mla": Format("MHA2MLA: torch file of the ranks of rotary pairs [layers, KV heads, head_dim]", _mha2mla),
    "longrope": Format(
        "rope_parameters of type longrope, if all heads share their frequencies", _longrope, needs_score=False
    ),
    "minference": Format(
        "MInference: JSON, per layer the columns and diagonals of every head, from measured rules",
        _minference,
        needs_score=False,
    ),
    "csv": Format("all heads: layer, head, kv_group and a column for each score", _csv),
    "latex": Format("a table of the best heads", _latex, ("top",)),
    "json": Format("the best heads as a HeadSet of headscope", _head_set, ("top",)),
}
"""Export formats by name."""
