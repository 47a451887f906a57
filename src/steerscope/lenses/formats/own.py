"""A pack on disk: a directory with `pack.json`, `concepts.json` and `lenses.safetensors`.

`pack.json` holds the checksum of every tensor and one hash of everything. The directory is written under another name
and moved into place, so it appears complete or not at all. Reading reports all problems in one error.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from steerscope.files import check_folder, flush, why_unreadable
from steerscope.lenses import hierarchy
from steerscope.lenses import tensors as arrays
from steerscope.lenses.spec import Concept, ConceptList, Manifest, PackInfo, TensorEntry
from steerscope.specs.errors import BadFile, InvalidRequest, Problem

MANIFEST = "pack.json"
CONCEPTS = "concepts.json"
TENSORS = "lenses.safetensors"


def digest(info: PackInfo, concepts: Sequence[Concept], entries: Mapping[str, TensorEntry]) -> str:
    """Return a hash of a pack's content; tensors enter by their checksums."""
    parts = [info, *concepts, *(entry for _, entry in sorted(entries.items()))]
    text = json.dumps([sorted(entries), [part.model_dump(mode="json") for part in parts]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write(
    path: Path,
    info: PackInfo,
    concepts: Sequence[Concept],
    tensors: Mapping[str, Tensor],
    entries: dict[str, TensorEntry],
) -> None:
    with _atomic_directory(path) as folder:
        listed = [concept.model_dump(mode="json", exclude_defaults=True) for concept in concepts]
        text = json.dumps({"concepts": listed}, ensure_ascii=False, indent=0).encode()
        (folder / CONCEPTS).write_bytes(text)
        plain = {name: tensor.contiguous().clone() if _shares(tensor) else tensor for name, tensor in tensors.items()}
        save_file(plain, folder / TENSORS, {"format": "pt"})
        (folder / TENSORS).chmod((folder / CONCEPTS).stat().st_mode)  # safetensors leaves 0600
        manifest = Manifest(
            info=info,
            entries=entries,
            digest=digest(info, concepts, entries),
        )
        (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _shares(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of a larger one, which safetensors does not write."""
    return not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes


@contextmanager
def _atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a directory that becomes `path` when the block succeeds and is removed when it fails.

    An existing directory is replaced only if it is empty or holds a pack.
    """
    target = check_folder(path)
    if target.exists() and not (target.is_dir() and ((target / MANIFEST).is_file() or not any(target.iterdir()))):
        raise BadFile(f"cannot write {path}: it is there and has no {MANIFEST}; choose another place")
    temporary = target.with_name(f".steerscope-{secrets.token_hex(8)}")
    try:
        temporary.mkdir()
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                flush(file)
        _put(temporary, target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadFile(f"cannot write {path}: {reason}") from error
    finally:
        with suppress(OSError):
            shutil.rmtree(temporary)


def _put(temporary: Path, target: Path) -> None:
    """Replace the target. A directory that is not empty must be renamed first, and is renamed back on an error."""
    if not target.exists():
        os.rename(temporary, target)
        return
    aside = target.with_name(f".steerscope-{secrets.token_hex(8)}")
    os.rename(target, aside)
    try:
        os.rename(temporary, target)
    except OSError:
        os.rename(aside, target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


# --- reading


def read(path: Path, verify: bool) -> tuple[Manifest, tuple[Concept, ...], dict[str, Tensor]]:
    if not path.is_dir():
        raise BadFile(f"{path} is not a pack: it is no directory")
    if not (path / MANIFEST).is_file():
        hatcat = ", but it may be one of HatCat: use load_hatcat" if (path / "pack_info.json").is_file() else ""
        raise BadFile(f"{path} is not a pack: it has no {MANIFEST}{hatcat}")
    try:
        manifest = Manifest.from_json((path / MANIFEST).read_bytes())
    except InvalidRequest as error:
        raise _refused(path, [problem.under(MANIFEST) for problem in error.problems]) from error
    except (OSError, RecursionError) as error:
        raise BadFile(f"{path / MANIFEST} cannot be read: {why_unreadable(error)}") from error
    problems, concepts = _read_concepts(path)
    more, tensors = _open_tensors(path, manifest)
    problems += more
    if concepts is not None:
        problems += arrays.shape_problems(manifest.info, len(concepts), manifest.entries)
        if not problems and digest(manifest.info, concepts, manifest.entries) != manifest.digest:
            problems.append(Problem(MANIFEST, "was changed: its digest is another", "copy the pack again"))
        if not problems and verify:
            problems = _verify(manifest, tensors) or arrays.value_problems(concepts, tensors)
    if problems or concepts is None:
        raise _refused(path, problems)
    return manifest, concepts, tensors


def digest_in(path: Path) -> str | None:
    """Return the digest of the pack in a folder, or None."""
    try:
        return Manifest.from_json((path / MANIFEST).read_bytes()).digest
    except (InvalidRequest, OSError, RecursionError):
        return None


def _refused(path: Path, problems: Sequence[Problem]) -> BadFile:
    return BadFile(f"{path} is not a readable pack: {InvalidRequest(problems)}")


def _read_concepts(path: Path) -> tuple[list[Problem], tuple[Concept, ...] | None]:
    try:
        concepts = ConceptList.from_json((path / CONCEPTS).read_bytes()).concepts
    except InvalidRequest as error:
        return [problem.under(CONCEPTS) for problem in error.problems], None
    except OSError:
        return [Problem(CONCEPTS, "is missing or cannot be read", "copy the pack again")], None
    problems = hierarchy.problems_of(concepts)
    if not problems and hierarchy.order(concepts) != list(range(len(concepts))):
        problems.append(Problem(CONCEPTS, "is not in the order of the hierarchy", "make the pack anew with Pack(…)"))
    return problems, concepts or None


def _open_tensors(path: Path, manifest: Manifest) -> tuple[list[Problem], dict[str, Tensor]]:
    """Map the tensors: each page is read when it is first used."""
    problems: list[Problem] = []
    try:
        tensors = load_file(path / TENSORS)
    except (SafetensorError, OSError, ValueError, RuntimeError):
        return [Problem(TENSORS, "is missing, damaged or of another kind", "copy the pack again")], {}
    named = {name: _described(entry) for name, entry in manifest.entries.items()}
    found = {name: _described(arrays.entry(tensor)) for name, tensor in tensors.items()}
    for name in sorted(named.keys() | found.keys()):
        if named.get(name) != found.get(name):
            what = f"is {found.get(name, 'missing')}, {MANIFEST} says {named.get(name, 'nothing of it')}"
            problems.append(Problem(name, what, "copy the pack again"))
    return problems, tensors


def _described(entry: TensorEntry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _verify(manifest: Manifest, tensors: Mapping[str, Tensor]) -> list[Problem]:
    return [
        Problem(name, "has another checksum than the pack names", "copy the pack again")
        for name, tensor in sorted(tensors.items())
        if arrays.checksum(tensor) != manifest.entries[name].sha256
    ]
