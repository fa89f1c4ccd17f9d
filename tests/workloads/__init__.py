"""Tests of the reference workloads, which import what they share from the folder that they are in."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "workloads"
sys.path.insert(0, str(FOLDER))
