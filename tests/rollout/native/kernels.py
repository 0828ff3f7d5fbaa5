"""Where tests of Triton kernels run: on the GPU if there is one, else in Triton's interpreter.

Import it before a module with kernels. Skips the importing test file where Triton isn't installed.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")


def _mend_interpreter() -> None:
    """What keeps the interpreter of Triton 3.6 from doing what a GPU does.

    It gives loop bounds as arrays of one element, which numpy 2.4 takes for no number, and numpy warns of infinities
    and NaN.
    """
    from triton.runtime import interpreter

    patch, run = interpreter._patch_lang_tensor, interpreter.GridExecutor.__call__

    def patch_and_convert(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def run_quietly(self: Any, *args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            run(self, *args, **kwargs)

    interpreter._patch_lang_tensor, interpreter.GridExecutor.__call__ = patch_and_convert, run_quietly


if DEVICE.type == "cpu":
    _mend_interpreter()
