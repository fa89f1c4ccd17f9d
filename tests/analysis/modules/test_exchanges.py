"""Which module's gradients an exchange reduces."""

from __future__ import annotations
