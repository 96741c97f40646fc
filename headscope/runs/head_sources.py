"""Heads as a command line names them: identifiers, a saved head set, or the top heads of a run."""

import re
from collections.abc import Iterable

from headscope.errors import BadInput
from headscope.heads import HeadSet
from headscope.runs.run import Run
from headscope.user_input import quote


def read_heads(names: Iterable[str]) -> HeadSet:
    """The heads of all `names`, in order, each once.

    A name is a head such as L18H6, `file:FILE` (a head set that `HeadSet.write` wrote, or a list of heads), or
    `run:FOLDER:STATISTIC:COUNT[:MODEL]` (the heads of the largest value of a column of `run.heads`). Raises BadInput
    for anything else, ResourceMissing without the file, BadRun if the folder is not a finished run.
    """
    heads = HeadSet(())
    for name in names:
        heads = heads | _read(name)
    return heads


def _read(name: str) -> HeadSet:
    source, _, rest = name.partition(":")
    if source == "file" and rest:
        return HeadSet.read(rest)
    if source == "run":
        match = re.fullmatch(r"(.+?):(\w+):([0-9]{1,6})(?::(.+))?", rest)
        if match is None:
            raise BadInput(f"{quote(name)} names no heads of a run. Write run:FOLDER:STATISTIC:COUNT or add :MODEL")
        folder, statistic, count, model = match.groups()
        return Run.open(folder).top_heads(statistic, int(count), model)
    try:
        return HeadSet.parse([name])
    except ValueError as error:
        raise BadInput(f"{error}, file:FILE or run:FOLDER:STATISTIC:COUNT") from error
