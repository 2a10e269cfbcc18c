"""Points the real client of the hub at a stand-in."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub import Hub


@contextmanager
def stand_in(folder: Path) -> Iterator[Hub]:
    """A stand-in hub that `huggingface_hub` talks to in this process, with no token but what a test gives.

    Args:
        folder: An empty folder, in which the client looks for a stored token.
    """
    from huggingface_hub import constants

    with Hub() as hub, pytest.MonkeyPatch.context() as patch:
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            patch.delenv(name, raising=False)
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.endpoint)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", hub.endpoint)
        yield hub
