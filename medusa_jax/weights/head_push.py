"""Uploading converted heads to the hub."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

from medusa_jax.errors import UserError
from medusa_jax.weights import hub

_OF_WEIGHTS = (".safetensors", ".pt", ".bin", ".gguf")


def check_repository(repo: str) -> None:
    """Raise UserError unless we are logged in and `repo` is a name that a repository can have."""
    api = huggingface_hub.HfApi()
    try:
        huggingface_hub.utils.validate_repo_id(repo)
        if repo.count("/") != 1:
            raise UserError(f"--push-to-hub {repo!r}: expected org/name")
        api.whoami()
    except errors.LocalTokenNotFoundError as error:
        raise UserError("--push-to-hub: not logged in; run 'hf auth login' or set HF_TOKEN") from error
    except (errors.HFValidationError, hub._HTTPError, OSError) as error:
        hub._explain(error, repo, None, None)


def push(folder: Path, repo: str) -> str:
    """Upload a folder; returns its address. The repository is made if there is none.

    Raises UserError when it cannot be, and when the repository holds weights that this folder does not:
    the runtimes' files contradict each other, and one that found both would read the wrong ones.
    """
    api = huggingface_hub.HfApi()
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    try:
        api.create_repo(repo, exist_ok=True)
        foreign = [n for n in api.list_repo_files(repo) if n.endswith(_OF_WEIGHTS) and n not in names]
        if foreign:
            raise UserError(
                f"{repo}: the repository already holds {foreign[0]}, which is of another kind; "
                "use one repository for each runtime"
            )
        return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Medusa heads"))
    except (errors.HFValidationError, hub._HTTPError, OSError) as error:
        hub._explain(error, repo, None, None)
