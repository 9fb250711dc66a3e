"""Work that takes gradients, called where torch has been told that none will be: inside
`torch.inference_mode`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Made = TypeVar("Made")


def outside_inference(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """A function that does its work outside of inference mode, wherever it is called."""

    @wraps(function)
    def ordinary(*arguments: Given.args, **named: Given.kwargs) -> Made:
        if not torch.is_inference_mode_enabled():
            return function(*arguments, **named)
        with torch.inference_mode(False):
            return function(*arguments, **named)

    return ordinary
