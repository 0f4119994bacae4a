"""The error of this folder."""

import bcg_compiler as bcg


class ModelError(bcg.BcgError, ValueError):
    """A configuration, a checkpoint or a batch that a serving model cannot take; the message says what to change."""
