"""Tokens come from a file or from the environment: command lines are visible to everybody on a machine."""

import os
import stat
from pathlib import Path

from beam_rl.model.errors import BadInput

ADMIN_VARIABLE = "BEAM_RL_ADMIN_TOKEN"
KEY_VARIABLE = "BEAM_RL_API_KEY"
SHORTEST = 16
"""Characters below which a token can be guessed."""


def read(option: str, file: Path | None, variable: str) -> str | None:
    """The token in a file, else in an environment variable; None where neither is given.

    Raises:
        BadInput: the file cannot be read or is readable for others, or the token is too short or not plain text; the
            message does not show it.
    """
    if file is None:
        token, where = os.environ.get(variable), variable
        if token is None:
            return None
    else:
        where = f"{option} {file}"
        try:
            mode = file.stat().st_mode
            token = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{where}: cannot be read ({type(error).__name__}).") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise BadInput(f"{where}: others may read it; chmod 600 it.")
    token = token.strip()
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise BadInput(f"{where}: a token needs at least {SHORTEST} printable ASCII characters without spaces.")
    return token
