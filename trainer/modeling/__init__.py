"""The DFlash method itself: target features, the drafter, its mask, its loss, its decoding. Knows no threads.

Importing this package is cheap; its modules import torch.
"""

from __future__ import annotations

from trainer.config import ConfigError


class ModelError(ConfigError):
    """A model's folder or configuration can't be used as it stands: the message names it and the cause."""
