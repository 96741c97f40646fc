"""Checkpoints on the Hugging Face hub: ORG/NAME, or ORG/NAME:REVISION with a branch, a tag or a commit.

Imports no torch, so that a hub id can be looked up before anything is opened.
"""

import logging
from functools import cache
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from headscope.base.model_spec import HubId
from headscope.errors import ResourceMissing, did_you_mean, first_line

log = logging.getLogger("headscope")

DOWNLOAD_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""Files that are downloaded: no code and no pickles."""
TIMEOUT_SECONDS = 10
"""How long to wait for the hub's first answer."""
CONNECTION_ERRORS = (httpx2.HTTPError, ConnectionError)


@cache
def fetch(hub_id: HubId, hint: str = "") -> Path:
    """Download a checkpoint and return its local folder, `.../snapshots/COMMIT`.

    If the hub does not answer, an earlier download is used. Within one process a branch keeps the commit of the first
    call. Raises ResourceMissing if neither is available; `hint` is added to the advice in its message.
    """
    try:
        # A quick request first: an unreachable hub would cost the download a minute of retries.
        HfApi().model_info(hub_id.repository, revision=hub_id.revision, timeout=TIMEOUT_SECONDS)
        return Path(snapshot_download(hub_id.repository, revision=hub_id.revision, allow_patterns=DOWNLOAD_PATTERNS))
    except HFValidationError as error:
        raise _invalid_id_error(str(hub_id)) from error
    except RepositoryNotFoundError as error:
        raise _no_access_error(error, str(hub_id)) from error
    except RevisionNotFoundError as error:
        available = list_revisions(hub_id.repository)
        raise ResourceMissing(
            f"hub model '{hub_id.repository}' has no revision '{hub_id.revision}'"
            f"{did_you_mean(str(hub_id.revision), available)}. Use one of: {_abbreviate(available)}"
        ) from error
    except CONNECTION_ERRORS as error:
        try:
            copy = snapshot_download(
                hub_id.repository, revision=hub_id.revision, allow_patterns=DOWNLOAD_PATTERNS, local_files_only=True
            )
            log.warning("the hub does not answer (%s); using the cached copy of '%s'", first_line(error), hub_id)
            return Path(copy)
        except LocalEntryNotFoundError:
            raise ResourceMissing(
                f"cannot fetch '{hub_id}' from the hub ({first_line(error)}), and no copy is cached. Check the "
                f"network, or use a local folder{hint}"
            ) from error


def list_revisions(repository: str) -> list[str]:
    """Branches and tags of a repository. Raises ResourceMissing if the hub cannot be reached or denies access."""
    try:
        refs = HfApi().list_repo_refs(repository)
    except HFValidationError as error:
        raise _invalid_id_error(repository) from error
    except RepositoryNotFoundError as error:
        raise _no_access_error(error, repository) from error
    except CONNECTION_ERRORS as error:
        raise ResourceMissing(
            f"cannot list the branches of '{repository}' on the hub ({first_line(error)}). Check the network, or name "
            f"each revision: --model {repository}:REVISION"
        ) from error
    return [ref.name for ref in (*refs.branches, *refs.tags)]


def snapshot_commit(folder: Path) -> str | None:
    """The commit of a folder that was downloaded from the hub, else None."""
    return folder.name if folder.parent.name == "snapshots" else None


def _no_access_error(error: RepositoryNotFoundError, name: str) -> ResourceMissing:
    if isinstance(error, GatedRepoError):
        return ResourceMissing(f"hub model '{name}' is gated. Accept its license on the hub and log in (hf auth login)")
    return ResourceMissing(f"no model '{name}' on the hub. Check the id, or log in if the model is private")


def _invalid_id_error(name: str) -> ResourceMissing:
    return ResourceMissing(f"'{name}' is neither a local path nor a valid hub id. Use a path, or an id ORG/NAME")


def _abbreviate(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
