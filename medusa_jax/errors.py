"""The error a user can act on, and files that may be missing, broken or not to be had.

Whatever is wrong with a name or a file comes back as one line that names it, never as an error of the
operating system's or of a parser's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import reprlib
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

LARGEST_JSON = 64 << 20  # bytes of a settings file; the largest real ones, indices of shards, have a tenth
LONGEST_LINE = 2**24  # bytes of a record; contexts are shorter
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONGEST_MESSAGE = 2000

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


class UserError(ValueError):
    """A mistake in a file, a field or a flag. The message is one line that names it.

    Programs print the message and exit with status 2; anything else is a fault of ours (status 1).
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        if len(line) > _LONGEST_MESSAGE:
            line = line[:_LONGEST_MESSAGE] + " ..."
        # Names come from strangers' files: what would move a terminal's cursor, or cannot be written to it
        # at all (half a surrogate pair), is shown as its escape.
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in line))


def shown(value: Any) -> str:
    """`repr(value)` for a message: cut short, and never failing, however large or deep the value."""
    try:
        return _REPR.repr(value)
    except (ValueError, RecursionError):  # ValueError: Python writes out no integer of over 4,300 digits
        return f"a very large {type(value).__name__}"


def user_path(text: str | os.PathLike[str], what: str = "") -> Path:
    """The path that a user gave, `~` expanded; whether something is there is left open.

    Raises UserError (beginning with `what`, the name of a flag or variable) for a name that no file can
    have, for an unknown home folder, and where the system does not let us look.
    """
    label = f"{what}: " if what else ""
    try:
        path = Path(text).expanduser()
        stat_of(path)
    except TypeError:
        raise UserError(f"{label}{shown(text)} is not a path") from None
    except RuntimeError:
        raise UserError(f"{label}{shown(os.fspath(text))}: that home folder is not known") from None
    except UserError as error:
        raise UserError(f"{label}{error}") from None
    return path


def stat_of(path: Path) -> os.stat_result | None:
    """The system's facts of what lies at `path`; None when nothing does. Raises UserError otherwise."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        name = shown(str(path)) if error.errno == errno.ENAMETOOLONG else path
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # a NUL in the name, or characters that the file system cannot write
        raise UserError(f"{shown(str(path))}: not a name a file can have ({error})") from None


def is_file(path: Path) -> bool:
    """Whether a regular file lies there. Unlike Path's, raises UserError where we may not look."""
    info = stat_of(path)
    return info is not None and stat.S_ISREG(info.st_mode)


def is_folder(path: Path) -> bool:
    """Whether a folder lies there. Unlike Path's `is_dir`, raises UserError where we may not look."""
    info = stat_of(path)
    return info is not None and stat.S_ISDIR(info.st_mode)


def require_file(path: Path) -> os.stat_result:
    """The facts of a regular file. Raises UserError for anything else: opening a pipe would wait forever."""
    info = stat_of(path)
    if info is None:
        raise UserError(f"{path}: no such file")
    if stat.S_ISDIR(info.st_mode):
        raise UserError(f"{path}: is a directory, expected a file")
    if not stat.S_ISREG(info.st_mode):
        raise UserError(f"{path}: a pipe, socket or device, expected a regular file")
    return info


def read_json_value(path: Path) -> Any:
    """Read JSON. Raises UserError naming the file when it is missing, no file, too large or not JSON."""
    size = require_file(path).st_size
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_JSON + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > LARGEST_JSON:
        raise UserError(f"{path}: {max(size, len(data))} bytes, expected at most {LARGEST_JSON} of JSON")
    try:
        return json.loads(data.decode("utf-8"))
    except ValueError as error:  # not UTF-8, not JSON, an integer of over 4,300 digits
        raise UserError(f"{path}: not valid JSON ({error})") from None
    except RecursionError:
        raise UserError(f"{path}: not usable JSON (nested too deeply)") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UserError as `read_json_value` does, and when it is not an object."""
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def json_lines(file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """The number (from 1) and value of each line of JSON; blank ones are passed over.

    What is wrong with a line comes as a UserError in place of its value, without the file's name. Only a line
    feed ends a line: a JSON text may hold other separators, such as U+2028.
    """
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
        if len(line) > LONGEST_LINE:
            while line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)
            yield number, UserError(f"more than {LONGEST_LINE:,} bytes, expected one record")
            continue
        try:
            # Without its end, or a mistake there would be said to be on the next line.
            text = (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).decode().rstrip()
            if text:
                yield number, json.loads(text)
        except UnicodeDecodeError as error:
            yield number, UserError(f"not UTF-8 ({error.reason} at byte {error.start + 1})")
        except json.JSONDecodeError as error:
            yield number, UserError(f"not valid JSON ({error.msg} at column {error.colno})")
        except RecursionError:
            yield number, UserError("not valid JSON (nested too deeply)")
        except ValueError as error:  # a number of thousands of digits
            yield number, UserError(f"not valid JSON ({error})")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all: under another name in its folder, then renamed.

    A link is followed. Raises UserError when the file cannot be written, or is there and no regular file
    (renaming would replace a device such as /dev/null).
    """
    try:
        if stat_of(path) is not None:
            require_file(path)
        path = path.resolve()
        partial = path.with_name(f".{uuid.uuid4().hex}.partial")
        try:
            with partial.open("xb") as file:  # not tempfile's 0600: the file is as readable as any other
                file.write(data)
            partial.replace(path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    except (ValueError, RuntimeError) as error:  # a path without a last part; links in a circle
        raise UserError(f"{path}: cannot be written ({error})") from None
