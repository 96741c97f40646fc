"""Files and folders that a user names as outputs: checked before the work, written beside their place and renamed."""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headscope.base.signals import uninterrupted
from headscope.base.user_input import check_path
from headscope.errors import CannotWrite

MAX_NAME_BYTES = 255
"""Longest file name in bytes."""
EDGE_BYTES = 2000
"""The mark of a file is among this many bytes of its start or of its end."""


@dataclass(frozen=True)
class Output:
    """A kind of file or folder that headscope writes.

    `description` is that of an older output, such as "a report of headscope", and `mark` is what it can be recognised
    by: bytes of a file, or the name of a file in a folder. Only such an output or an empty file or folder is replaced;
    without a mark nothing is. Messages call the path `option`.
    """

    description: str = ""
    mark: bytes | str = b""
    option: str = "--out"

    def check(self, path: Path | str) -> Path:
        """The path with "~" expanded.

        Raises CannotWrite if the output could not be written there, or would replace what headscope did not write.
        """
        out = check_path(path, self.option)
        with self._converted_errors(out):
            status = _check_place(out)
            if status is not None and not self._may_replace(out, status):
                reason = f"it exists and is not {self.description}" if self.mark else "it exists already"
                raise CannotWrite(f"cannot write {out}: {reason}. Choose another {self.option}, or remove it")
        return out

    @contextmanager
    def draft(self, path: Path | str) -> Iterator[Path]:
        """The path of a draft, a file or folder that the block writes and that replaces the output at its end.

        If the block fails, nothing remains. Raises CannotWrite as `check` does, and if the block cannot write.
        """
        target = Path(os.path.realpath(self.check(path)))
        with self._converted_errors(Path(path)), new_folders(target.parent):
            scratch = Path(tempfile.mkdtemp(prefix=".headscope-", dir=target.parent))
            try:
                yield scratch / "new"
                with uninterrupted():
                    if target.is_dir():
                        target.rename(scratch / "old")
                    (scratch / "new").replace(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)

    def write(self, path: Path | str, content: bytes | Callable[[Path], object]) -> Path:
        """Write a file, its bytes or with a function that takes its path, and return its path with "~" expanded."""
        with self.draft(path) as draft:
            content(draft) if callable(content) else draft.write_bytes(content)
        return check_path(path, self.option)

    def _may_replace(self, out: Path, status: os.stat_result) -> bool:
        is_folder = isinstance(self.mark, str)
        if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a folder" if is_folder else "not a regular file"
            raise CannotWrite(f"cannot write {out}: it exists and is {kind}. Choose another {self.option}")
        if isinstance(self.mark, str):
            return (out / self.mark).is_file() or not any(out.iterdir())
        with out.open("rb") as file:
            start = file.read(EDGE_BYTES)
            file.seek(max(0, status.st_size - EDGE_BYTES))
            return bool(self.mark) and (not start or self.mark in start or self.mark in file.read())

    @contextmanager
    def _converted_errors(self, out: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            advice = "Free some space, or choose" if error.errno == errno.ENOSPC else "Choose"
            reason = os.strerror(error.errno) if error.errno else error
            raise CannotWrite(f"cannot write {out}: {reason}. {advice} another {self.option}") from error


def check_run_folder(path: Path | str, option: str = "out") -> Path:
    """The folder in which runs are stored, with "~" expanded. Raises CannotWrite if no run could be stored there."""
    out = check_path(path, option)
    try:
        _check_place(out / "run")
    except OSError as error:
        raise CannotWrite(f"cannot write to {out}: {os.strerror(error.errno or 0)}. Choose another --out") from error
    return out


@contextmanager
def new_folders(folder: Path) -> Iterator[None]:
    """Create the folder and its parents; if the block fails, remove those that did not exist and are empty."""
    missing = missing_folders(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        remove_empty(missing)
        raise


def missing_folders(folder: Path) -> list[Path]:
    """The folder and its parents that do not exist, the deepest first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: list[Path]) -> None:
    """Remove the folders, from the deepest up to the first that is not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _check_place(path: Path) -> os.stat_result | None:
    """The status of the path, None if there is nothing. Raises OSError if no file of this path could be created."""
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "")
    status = None
    with suppress(FileNotFoundError):
        status = path.stat()
    if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in path.parts):
        raise OSError(errno.ENAMETOOLONG, "")
    folder = next((parent for parent in Path(os.path.realpath(path)).parents if parent.exists()), Path("/"))
    if not folder.is_dir():
        raise OSError(errno.ENOTDIR, "")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, "")
    return status
