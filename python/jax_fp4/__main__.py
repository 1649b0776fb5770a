"""``python -m jax_fp4``: see jax_fp4.cli."""

import sys

from jax_fp4.cli import main

sys.exit(main())
