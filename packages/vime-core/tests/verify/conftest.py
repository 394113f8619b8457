from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if "synthetic" not in sys.modules:
    spec = importlib.util.spec_from_file_location("synthetic", Path(__file__).parents[1] / "record" / "synthetic.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["synthetic"] = module
    spec.loader.exec_module(module)
