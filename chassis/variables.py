"""The environment variables that begin with `LORRERY_`: which are settings, and which are not.

This file imports nothing slow: every command asks here whether there is an environment to read.
"""

import os

ENV_PREFIX = "LORRERY_"
API_KEY_VARIABLE = "LORRERY_API_KEY"
"""Where clients look for their key."""
_NOT_SETTINGS = {"LORRERY_CONFIG", "LORRERY_SHARED", API_KEY_VARIABLE}


def setting_variables() -> list[str]:
    """Return the environment variables that are to be settings, in whatever case they are written."""
    return [name for name in os.environ if name.upper().startswith(ENV_PREFIX) and name.upper() not in _NOT_SETTINGS]
