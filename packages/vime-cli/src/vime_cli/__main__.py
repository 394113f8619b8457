"""``python -m vime_cli``: the same as ``vime``."""

from __future__ import annotations

import sys

from vime_cli.main import main

sys.exit(main())
