"""Uploads to the Hugging Face Hub, when a user asks for one."""

import re
from pathlib import Path
from typing import Any


def check_push(repo: str) -> None:
    """ValueError or OSError unless the user is logged in and may write to ``repo``: to be called before any work."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo) or "--" in repo or ".." in repo or len(repo) > 96:
        raise ValueError(f"--push takes a name on the Hub such as user/model, got {repo!r}")
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ValueError("--push needs huggingface_hub: pip install huggingface_hub") from None
    try:
        user: dict[str, Any] = HfApi().whoami()
    except Exception as error:
        why = "" if _is_login(error) else f" ({_reason(error)})"
        advice = "log in by: hf auth login" if _is_login(error) else "the folder can be pushed later: leave off --push"
        raise OSError(f"the Hub does not answer for --push {repo}{why}; {advice}") from error
    names = [user.get("name"), *(org.get("name") for org in user.get("orgs", []))]
    if (owner := repo.split("/")[0]) not in names:
        yours = f"{names[0]}/{repo.split('/')[1]}"
        raise ValueError(f"you are logged in as {names[0]}, who is not a member of {owner}; use --push {yours}")


def push(folder: Path, repo: str, *, private: bool = False) -> str:
    """Upload a folder, as one commit, and return where it is to be seen."""
    from huggingface_hub import HfApi

    try:
        url = HfApi().create_repo(repo, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message="Pruned by Prunus")
    except Exception as error:
        again = f"prunus export {folder} --push {repo}"
        raise OSError(f"{folder} is complete but was not pushed ({_reason(error)}); try again: {again}") from error
    return str(url)


def _is_login(error: Exception) -> bool:
    response = getattr(error, "response", None)
    return type(error).__name__ == "LocalTokenNotFoundError" or getattr(response, "status_code", None) in (401, 403)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
