"""Runs on the Hugging Face hub: folders of dataset repositories, each with the name of its run."""

import re
from pathlib import Path
from typing import Any

from headscope.errors import BadInput, CannotWrite, HeadscopeError, ResourceMissing, first_line
from headscope.runs.notes import NOTES_FILE

FILE_PATTERNS = ("*.json", "*.parquet", "*.safetensors")
"""Files of a run that are shared: no code and no pickles. Notes (`notes.json`) stay where they were written."""
CARD = """---
tags: [headscope]
---
# Measurements of attention heads

Runs of headscope, one per folder. Open one with `headscope.Run.from_hub("{repository}")`, or read its parquet tables.
"""
REPOSITORY_PATTERN = re.compile(r"[\w.-]+/[\w.-]+")


def push(folder: Path, name: str, repository: str, private: bool = True, token: str | None = None) -> str:
    """Upload the run in `folder` as folder `name` of a dataset repository, which is created if needed; return its URL.

    Nothing is uploaded unless all files are: they become one commit. Raises BadInput for an invalid repository, and
    CannotWrite if the hub cannot be reached or refuses the upload.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    _check_repository(repository)
    files = sorted(file for pattern in FILE_PATTERNS for file in folder.rglob(pattern) if file.name != NOTES_FILE)
    operations = [CommitOperationAdd(f"{name}/{file.relative_to(folder).as_posix()}", file) for file in files]
    try:
        api = HfApi(token=token)
        url = api.create_repo(repository, repo_type="dataset", private=private, exist_ok=True)
        if "README.md" not in api.list_repo_files(repository, repo_type="dataset"):
            card = CARD.format(repository=repository).encode()
            operations.append(CommitOperationAdd("README.md", card))
        api.create_commit(repository, operations, commit_message=f"Add {name}", repo_type="dataset")
    except Exception as error:  # the client raises errors of several libraries
        raise CannotWrite(
            f"cannot upload to dataset '{repository}' ({first_line(error)}). Check the name and the network, and log "
            "in (hf auth login)"
        ) from error
    return str(url)


def fetch(repository: str, name: str | None = None, revision: str | None = None, token: str | None = None) -> Path:
    """Download a run from a dataset repository and return its folder; `name` may be left out if there is only one.

    Raises BadInput for an invalid repository or name, and ResourceMissing if the hub has no such run or does not
    answer.
    """
    from huggingface_hub import HfApi, snapshot_download

    _check_repository(repository)
    source: dict[str, Any] = {"repo_type": "dataset", "revision": revision, "token": token}
    try:
        files = HfApi().list_repo_files(repository, **source)
        folders = (file.removesuffix("/run.json") for file in files if file.endswith("/run.json"))
        names = sorted(folder for folder in folders if "/" not in folder)
        chosen = _choose(repository, names, name)
        patterns = [f"{chosen}/{pattern}" for pattern in FILE_PATTERNS]
        return Path(snapshot_download(repository, allow_patterns=patterns, **source)) / chosen
    except HeadscopeError:
        raise
    except Exception as error:  # the client raises errors of several libraries
        raise ResourceMissing(
            f"cannot fetch dataset '{repository}' from the hub ({first_line(error)}). Check the name, the revision and "
            "the network, or log in (hf auth login)"
        ) from error


def _choose(repository: str, names: list[str], name: str | None) -> str:
    if not names:
        raise ResourceMissing(f"dataset '{repository}' holds no run. Use a repository that push_to_hub wrote")
    if name is None and len(names) == 1:
        return names[0]
    if name not in names:
        problem = f"holds {len(names)} runs" if name is None else f"has no run '{name}'"
        raise BadInput(f"dataset '{repository}' {problem}. Name one of: {', '.join(names)}")
    return name


def _check_repository(repository: str) -> None:
    if not isinstance(repository, str) or not REPOSITORY_PATTERN.fullmatch(repository):
        raise BadInput(f"invalid dataset repository '{str(repository)[:80]}'. Write ORG/NAME")
