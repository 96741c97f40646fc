"""Task files of the lm-evaluation-harness."""

import json
from pathlib import Path
from typing import Any

import yaml

QUESTIONS = (
    ("The colour of grass is", ("green", "purple", "orange"), 0),
    ("The colour of blood is", ("yellow", "red", "blue"), 1),
    ("Snow is", ("black", "brown", "white"), 2),
    ("A ripe banana is", ("yellow", "blue", "grey"), 0),
    ("The sky on a clear day is", ("green", "blue", "pink"), 1),
)


def write_colours(folder: Path) -> Path:
    """Write the task `colours`, five questions; return its file."""
    metrics = [{"metric": metric, "higher_is_better": True} for metric in ("acc", "acc_norm")]
    return write_task(
        folder,
        "colours",
        [{"question": question, "choices": choices, "answer": answer} for question, choices, answer in QUESTIONS],
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        doc_to_choice="{{choices}}",
        metric_list=[*metrics, {"metric": "brier_score", "higher_is_better": False}],
    )


def write_task(folder: Path, name: str, documents: list[dict[str, Any]], **config: Any) -> Path:
    """Write the documents and the file of a task; return the file."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": f"{folder}/{name}.jsonl"}, "test_split": "train"}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"task": name, **data, **config}))
    return file
