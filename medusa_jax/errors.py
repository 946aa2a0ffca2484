"""The error a user can act on, and reading files that may be missing or broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """A mistake in a file, a field or a flag. The message is one line that names it.

    Programs print the message and exit with status 2; anything else is a fault of ours (status 1).
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UserError naming the file when it is missing or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # json.JSONDecodeError and UnicodeDecodeError
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
