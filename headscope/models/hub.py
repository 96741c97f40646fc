"""Checkpoints on the Hugging Face hub: ORG/NAME, or ORG/NAME:REVISION with a branch, a tag or a commit.

Imports no torch: what lies on the hub can be looked up before anything is opened.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from headscope.errors import Missing, first_line, nearest

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""What is fetched: nothing that is code or pickled."""
SECONDS = 10
"""How long the hub has for an answer."""
UNREACHED = (httpx2.HTTPError, ConnectionError)


@dataclass(frozen=True)
class HubId:
    """A repository of the hub, and its revision if one is named."""

    repository: str
    revision: str | None = None

    @classmethod
    def read(cls, text: str) -> "HubId | None":
        """The hub id that `text` is, or None."""
        named = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?::([^\s:@]+))?", text)
        return cls(named[1], named[2]) if named else None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}:{self.revision}"


@cache
def fetched(wanted: HubId, hint: str = "") -> Path:
    """The local folder of a checkpoint, `.../snapshots/COMMIT`: fetched where the hub answers, else an earlier copy.

    A branch that moves meanwhile stays what it was for this process. Raises Missing where neither is to be had; `hint`
    is what else to do then.
    """
    try:
        # One quick question first: an unreachable hub would cost the download a minute of retries.
        HfApi().model_info(wanted.repository, revision=wanted.revision, timeout=SECONDS)
        return Path(snapshot_download(wanted.repository, revision=wanted.revision, allow_patterns=FILES))
    except RepositoryNotFoundError as error:
        raise _closed(error, str(wanted)) from error
    except RevisionNotFoundError as error:
        known = revisions(wanted.repository)
        raise Missing(
            f"hub model '{wanted.repository}' has no revision '{wanted.revision}'"
            f"{nearest(str(wanted.revision), known)}; it has {_few(known)}"
        ) from error
    except UNREACHED as error:
        try:
            copy = snapshot_download(
                wanted.repository, revision=wanted.revision, allow_patterns=FILES, local_files_only=True
            )
            return Path(copy)
        except LocalEntryNotFoundError:
            raise Missing(
                f"cannot fetch '{wanted}' from the hub ({first_line(error)}) and no copy is in its cache; "
                f"check the network, or give a local folder{hint}"
            ) from error


def revisions(repository: str) -> list[str]:
    """The branches and tags of a repository. Raises Missing where the hub does not tell."""
    try:
        refs = HfApi().list_repo_refs(repository)
    except RepositoryNotFoundError as error:
        raise _closed(error, repository) from error
    except UNREACHED as error:
        raise Missing(
            f"cannot list the branches of '{repository}' on the hub ({first_line(error)}); check the network, or name "
            f"each revision: --model {repository}:REVISION"
        ) from error
    return [ref.name for ref in (*refs.branches, *refs.tags)]


def commit(folder: Path) -> str | None:
    """The commit of a folder that was fetched from the hub."""
    return folder.name if folder.parent.name == "snapshots" else None


def _closed(error: RepositoryNotFoundError, name: str) -> Missing:
    if isinstance(error, GatedRepoError):
        return Missing(f"hub model '{name}' is gated: accept its licence on the hub and log in (hf auth login)")
    return Missing(f"no model '{name}' on the hub: check the id, or log in if it is private")


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
