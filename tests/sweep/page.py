"""The support matrix as a page, from the record of a sweep."""

from collections.abc import Mapping
from typing import Any

YES = "yes"
ONE_SHOT = ("magnitude", "wanda", "fisher")
CHECKS = ("training", *ONE_SHOT, "repair", "export", "doctor", "sparse run")


def page(record: Mapping[str, Any]) -> str:
    return str(record)
