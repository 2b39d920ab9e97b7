"""How hypothesis draws: the same examples at every run of the suite, new ones and many more where bugs are searched for.

Imported by conftest.py before any test module, because a test takes its settings when it is decorated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

TIMES = int(os.environ.get("SEARCH_TIMES", "20"))
"""How many times a test's usual number of examples a search draws."""

# no deadline and no check for slow drawing: neither may depend on how busy the machine is
settings.register_profile(
    "suite",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", settings.get_profile("suite"), derandomize=False)
settings.load_profile("suite")


def configure() -> None:
    """Keep chance out of the suite. To be called when the command line's profile is known.

    hypothesis also draws constants that it finds in the project's imported modules. Which are imported depends on the tests
    that ran before in this process, and any new constant would change what every test draws. A search keeps them.
    """
    if settings.get_current_profile_name() != "search":
        none = providers.Constants()
        providers._get_local_constants = lambda: none


def search(tests: Iterable[Callable[..., object]]) -> None:
    """In a search let each property test, whatever number it asks for, draw TIMES as many examples."""
    if settings.get_current_profile_name() != "search":
        return
    for test in set(tests):
        own = getattr(test, "_hypothesis_internal_use_settings", None)
        if own is not None:
            test._hypothesis_internal_use_settings = settings(own, max_examples=TIMES * own.max_examples)  # type: ignore[attr-defined]
