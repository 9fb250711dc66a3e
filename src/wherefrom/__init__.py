"""wherefrom: which training images made this generated image?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """What public.py names. It brings torch, which takes seconds: help texts, a Tab in the
        shell and whoever wants one module alone do not wait for it.
        """
        if not name.startswith("__") or name == "__all__":
            public = import_module(".public", __name__)
            names = getattr(public, "__all__", ())  # none yet: it is being imported
            globals().update({one: getattr(public, one) for one in names}, __all__=[*names])
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
