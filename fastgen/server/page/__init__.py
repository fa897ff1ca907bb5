"""The page at ``/``: a chat and a live view. Plain files, no build step, nothing from elsewhere."""

from __future__ import annotations

from fastgen.server.page.routes import PATHS, router

__all__ = ["PATHS", "router"]
