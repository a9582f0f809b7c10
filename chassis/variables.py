"""The environment variables that begin with `LORRERY_`, and which of them are settings.

This file imports nothing slow: every command calls it to find out whether the environment has settings.
"""

import os

ENV_PREFIX = "LORRERY_"
API_KEY_VARIABLE = "LORRERY_API_KEY"
"""Variable with a client's API key."""
_NOT_SETTINGS = {"LORRERY_CONFIG", "LORRERY_SHARED", API_KEY_VARIABLE}


def setting_variables() -> list[str]:
    """Return the environment variables that are settings, in any case."""
    return [name for name in os.environ if name.upper().startswith(ENV_PREFIX) and name.upper() not in _NOT_SETTINGS]
