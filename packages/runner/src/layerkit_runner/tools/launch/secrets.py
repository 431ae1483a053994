"""Recognizes variables that hold secrets, by the words of their names and the forms of values."""

from __future__ import annotations

import re

# A word of a name between underscores. "PASS" and the like also end words, as in PGPASS.
_SECRET_WORD = re.compile(
    r".*(PASSWORD|PASSWD|PASSPHRASE|PASS|PWD|SECRET|COOKIE)S?"
    r"|PAT|AUTH|BEARER|DSN|JWT",
    re.IGNORECASE,
)
# In machine learning, these words also name numbers, such as MAX_TOKENS.
_SECRET_UNLESS_NUMBER = re.compile(r".*(KEY|TOKEN)S?", re.IGNORECASE)
_SECRET_UNLESS_PATH = re.compile(r"(CREDENTIAL|CRED)S?", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?\d{0,9}\.?\d{0,9}(e[+-]?\d+)?|true|false", re.IGNORECASE)
_FOLDERS = ("PWD", "OLDPWD")

_SECRET_VALUE = re.compile(
    "|".join(
        (
            r"://[^\s/@]*:[^\s@]+@",  # URL with a password
            r"://[^\s/@]{20,}@",  # URL with a token in place of a user
            r"[?&](token|key|api_?key|access_token|secret|password|sig|signature)=[^&\s]",
            # Connection strings of databases and stores.
            r"\b(password|passwd|pwd|accountkey|sharedaccesskey)\s*=\s*[^;\s$]",
            r"\b(bearer|basic)\s+[\w.~+/-]{8,}",  # header of a request
            r"-----BEGIN [A-Z ]*PRIVATE KEY",
            r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.",  # JSON web token
        )
    ),
    re.IGNORECASE,
)
# Prefixes by which services mark their tokens, so that scanners find them.
_TOKEN = re.compile(
    r"\b(hf_|gh[oprsu]_|github_pat_|glpat-|sk_live_|rk_live_|xox[abeoprs]-|npm_|pypi-|dckr_pat_|nvapi-"
    r"|gsk_|r8_|ya29\.|wandb_v1_|dop_v1_|shpat_|lsv2_)[\w.-]{12,}"
    r"|\b(sk|pk)-[\w-]{20,}|\b(AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\bSG\.[\w-]{16,}\."
)


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable of this name with this value probably holds a secret."""
    if _SECRET_VALUE.search(value) or _TOKEN.search(value):
        return True
    if name in _FOLDERS or not value:
        return False
    is_number, is_path = bool(_NUMBER.fullmatch(value)), value.startswith(("/", "~", "./"))
    return any(
        _SECRET_WORD.fullmatch(word)
        or (_SECRET_UNLESS_NUMBER.fullmatch(word) and not is_number)
        or (_SECRET_UNLESS_PATH.fullmatch(word) and not is_path)
        for word in (part.rstrip("0123456789") for part in name.split("_"))
    )
