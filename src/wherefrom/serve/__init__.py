"""The page of a run in a browser: generate or give an image, and see its sources. `app` is the
server as FastAPI knows it, `serve` runs it.
"""

from ..errors import need

for _package in ("fastapi", "uvicorn", "PIL"):
    need(_package, "serve")

from .running import serve  # noqa: E402
from .server import app  # noqa: E402

__all__ = ["app", "serve"]
