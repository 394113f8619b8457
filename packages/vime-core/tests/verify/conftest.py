from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HELPERS = {
    "synthetic": Path(__file__).parents[1] / "record" / "synthetic.py",
    "fakes": Path(__file__).with_name("fakes.py"),
}

for name, path in HELPERS.items():
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
