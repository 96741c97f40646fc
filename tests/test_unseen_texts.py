"""Texts for judging claims: works from unpacked Debian packages, without front matter."""

import gzip
import re
import struct
import zlib
from pathlib import Path

import pytest

from headscope.prompts import unseen_texts

MANUALS = unseen_texts.MANUALS.items()


def rest(name: str) -> str:
    return f"{name} goes on.\n" * 400


def r_strings(lines: list[str]) -> bytes:
    """One value of an R package's database: length, then a zlib stream of a serialized vector of strings."""
    header = b"X\n" + struct.pack(">iii", 3, 0x040201, 0x030500) + struct.pack(">i", 5) + b"UTF-8"
    strings = b"".join(struct.pack(">ii", 0x00040009, len(line.encode())) + line.encode() for line in lines)
    stream = zlib.compress(header + struct.pack(">ii", 16, len(lines)) + strings)
    return struct.pack(">i", len(stream)) + stream


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Files where the packages have them, each with front matter before the words at which its text starts."""
    root = tmp_path / "packages"
    files = {f"usr/share/doc/{pages}": f"Contents\n{words} {rest(name)}" for name, (pages, words) in MANUALS}
    files["usr/share/dictd/devil.dict.dz"] = f"00-database-info\n  ABASEMENT\nABASEMENT, n. {rest('devil')}"
    for name, text in files.items():
        file = root / re.sub(r"\[(.).*?\]", r"\1", name).replace("*", "")  # the first file that a pattern matches
        file.parent.mkdir(parents=True, exist_ok=True)
        compressed = file.suffix in {".gz", ".dz"}
        file.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    novels = [["TITLE", "CHAPTER I" if place % 2 else "Chapter 1", "", f"Novel {name}: “é”.", *rest(name).split("\n")]
              for place, name in enumerate(unseen_texts.NOVELS)]  # fmt: skip
    database = root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    database.parent.mkdir(parents=True)
    database.write_bytes(b"".join(map(r_strings, novels)))
    return root


def test_every_work_starts_with_its_own_text(packages: Path, tmp_path: Path) -> None:
    unseen_texts.write_texts(packages, tmp_path / "texts")
    texts = {file.stem: file.read_text() for file in (tmp_path / "texts").iterdir()}
    assert len(texts) == 22
    for name, (_, words) in MANUALS:
        assert texts[f"manual-{name}"].startswith(words)
    for name in unseen_texts.NOVELS:
        assert texts[f"novel-{name}"].startswith(f"Novel {name}: “é”.\n{name} goes on.")
    assert texts["dictionary-devil"].startswith("ABASEMENT, n. devil")


@pytest.mark.parametrize("path", unseen_texts.REQUIRED)
def test_a_missing_file_is_named_and_nothing_is_written(path: str, packages: Path, tmp_path: Path) -> None:
    for file in packages.glob(path):
        file.unlink()
    with pytest.raises(SystemExit) as missing:
        unseen_texts.write_texts(packages, tmp_path / "texts")
    assert path in str(missing.value)
    assert not (tmp_path / "texts").exists()


def test_short_texts_and_an_existing_folder_are_refused(packages: Path, tmp_path: Path) -> None:
    manual = packages / "usr/share/doc/mutt/manual.txt.gz"
    manual.write_bytes(gzip.compress(b"Mutt is a small"))
    with pytest.raises(SystemExit) as short:
        unseen_texts.write_texts(packages, tmp_path / "texts")
    assert "manual-mutt" in str(short.value)
    manual.write_bytes(gzip.compress(b"Elm"))
    with pytest.raises(SystemExit) as other:
        unseen_texts.write_texts(packages, tmp_path / "texts")
    assert "'Mutt is a small'" in str(other.value)
    assert not (tmp_path / "texts").exists()
    (tmp_path / "texts").mkdir()
    with pytest.raises(SystemExit) as existing:
        unseen_texts.write_texts(packages, tmp_path / "texts")
    assert str(tmp_path / "texts") in str(existing.value)
