from tests.running import runner, session

__all__ = ["runner", "session"]
