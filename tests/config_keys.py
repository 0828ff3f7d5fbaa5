"""The script that writes the configuration's page, as a module: the pages' and the tree's tests ask it for the keys."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "config_reference.py"


@cache
def reference() -> ModuleType:
    """``scripts/config_reference.py``, loaded from its file."""
    spec = importlib.util.spec_from_file_location("config_reference", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["config_reference"] = module
    spec.loader.exec_module(module)
    return module
