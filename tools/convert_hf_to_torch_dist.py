"""``tools/convert_hf_to_torch_dist.py --hf-checkpoint DIR --save DIR [Megatron's model flags]``.

A thin call of ``vime convert hf-to-torch-dist`` under the name that the field's scripts use. Model flags, as
``scripts/models/*.sh`` set them in ``MODEL_ARGS``, are compared with the checkpoint, never trusted over it.
"""

from __future__ import annotations

import sys

from vime_cli.main import main

if __name__ == "__main__":
    sys.argv[1:] = ["convert", "hf-to-torch-dist", *sys.argv[1:]]
    sys.exit(main())
