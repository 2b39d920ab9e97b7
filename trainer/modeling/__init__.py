"""The DFlash method itself: target features, the drafter, its attention mask and its loss. Knows no threads
and no files but models.

Importing this package is cheap; its modules import torch.
"""

from __future__ import annotations

from trainer.config import ConfigError


class ModelError(ConfigError):
    """A model folder or a model configuration can't be used as it stands: the message names it, the cause
    and the fix."""
