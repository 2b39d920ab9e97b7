"""A workspace on this machine, and a session with it."""

from tests.running import runner, session

__all__ = ["runner", "session"]
