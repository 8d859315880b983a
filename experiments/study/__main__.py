"""`python -m experiments.study`, the same as `eagle3 study`."""

from __future__ import annotations

import sys

from experiments.cli import main

sys.argv[1:1] = ["study"]
main()
