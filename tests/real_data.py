"""Where the real data sets lie that some tests use, if they are there."""

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("TAILORING_SHARED", Path(__file__).parent.parent.parent / "shared" / "data"))


def needs(name):
    return pytest.mark.skipif(not (SHARED / name).exists(), reason=f"{SHARED / name} is not there")
