"""Tests in ``interpreted`` need TRITON_INTERPRET=1 before Triton is imported: test_interpreted.py starts them."""

import os


def pytest_ignore_collect(collection_path):
    if "interpreted" in collection_path.parts and os.environ.get("TRITON_INTERPRET") != "1":
        return True
    return None
