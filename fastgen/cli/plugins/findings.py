"""What a check found: passed, failed or not asked, in one line, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Finding", "failed", "passed", "skipped", "warned"]

Status = Literal["pass", "fail", "warn", "skip"]


@dataclass(frozen=True, slots=True)
class Finding:
    """``check`` is its short name, ``detail`` what was seen, ``remedy`` what the author should do (failures and
    warnings alone have one)."""

    check: str
    status: Status
    detail: str
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "remedy": self.remedy or None}


def passed(check: str, detail: str) -> Finding:
    return Finding(check, "pass", detail)


def failed(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check, "fail", detail, remedy)


def warned(check: str, detail: str, remedy: str) -> Finding:
    """Seen, but no reason not to publish."""
    return Finding(check, "warn", detail, remedy)


def skipped(check: str, detail: str) -> Finding:
    return Finding(check, "skip", detail)
